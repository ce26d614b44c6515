"""Mixture of experts: a router, and SwiGLU experts of which each token meets `model.top_k`.

Shapes: B batch, L length, T = B * L tokens, D model, E experts, F hidden units of an expert, G = 2F gate and up.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from megatron_blackmamba.kinds.base import BOOL, FP32, INT64, Cannot, Decoding, Division, LayerKind, Runner, Sizes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_blackmamba.config import ModelConfig
    from megatron_blackmamba.ops.decoding import Step


class Experts(LayerKind):
    letter, name = "E", "mixture of experts"
    block = "megatron_blackmamba.model.specs:experts_block"
    cut = None
    routed = True
    recompute = frozenset({"layers", "experts"})
    writes_to_residual = ("fc2", "linear_fc2.weight")
    released = True
    entry = "a number of experts"

    def problems(self, model: ModelConfig) -> list[str]:
        return [] if model.expert_hidden_size else ["the pattern has E layers: set model.expert_hidden_size"]

    def megatron(self, model: ModelConfig) -> dict[str, Any]:
        return {"num_moe_experts": model.experts, "moe_ffn_hidden_size": model.expert_hidden_size}

    def divisions(self, model: ModelConfig) -> list[Division]:
        return [
            Division("model.expert_hidden_size", model.expert_hidden_size or 0, "expert_tensor"),
            Division("model.experts", model.experts, "expert"),
        ]

    def parts(self, model: ModelConfig) -> dict[str, Fraction]:
        return {"router": Fraction(1), "experts": Fraction(model.top_k, model.experts)}

    def part_of(self, parameter: str) -> str:
        return "router" if parameter.startswith("router.") else "experts"

    def shapes(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        D, E, F = _sizes(model)
        shapes: dict[str, tuple[int, ...]] = {"router.weight": (E, D), "router.bias": (E,)}
        for e in range(E):
            shapes[f"local_experts.{e}.linear_fc1.weight"] = (2 * F, D)  # rows [gate | up]
            shapes[f"local_experts.{e}.linear_fc2.weight"] = (D, F)
        return shapes

    def initial(self, name: str, shape: tuple[int, ...], model: ModelConfig, random: torch.Generator) -> Tensor | None:
        import torch

        return torch.zeros(shape) if name == "router.bias" else None

    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        D, E, F = _sizes(model)
        return {"router": 2 * D * E, "experts": model.top_k * 6 * D * F}

    def kept(self, at: Sizes) -> int:
        """The router's fp32 input, logits and maps; the experts' input, gate and up, and product. GPUs also keep the
        activation, and the output before the token's weight."""
        D, E, hidden = _sizes(at.model)
        F = hidden // at.expert_tensor
        router = FP32 * D + (2 * FP32 + 2 * BOOL) * E
        apart = 0 if at.device == "cpu" else D + F
        expert = at.width * (D + 3 * F + apart) + FP32 + INT64
        return at.here * router + at.routed * expert

    def traffic(self, at: Sizes, passes: int) -> dict[str, float]:
        """Tokens go to their experts and back; where ranks share an expert, its tokens are gathered and its outputs
        summed."""
        D = at.model.hidden_size
        tokens = at.here * at.model.top_k
        return {
            "expert": 2 * passes * tokens * (D * at.width + FP32),
            "expert_tensor": 2 * passes * at.routed * D * at.width,
        }

    def paper_flops(self, model: ModelConfig, tokens: int) -> tuple[float, float] | None:
        D, E, _ = _sizes(model)
        return D * E * (16 * D + 2), 16 * D * D + 2 * D * E

    def exported(self, model: ModelConfig) -> str | Cannot:
        if model.router.kind != "sinkhorn":
            return Cannot(
                f"model.router.kind is {model.router.kind}; only the top-1 sigmoid router (sinkhorn) converts"
            )
        return str(model.experts)

    def imported(self, entry: str) -> dict[str, Any] | None:
        return {"experts": int(entry)} if entry.isdecimal() and int(entry) > 0 else None

    def decoding(self, model: ModelConfig) -> Decoding | Cannot:
        exported = self.exported(model)
        return exported if isinstance(exported, Cannot) else ExpertsDecoding()


def _sizes(model: ModelConfig) -> tuple[int, int, int]:
    """D, E, F."""
    return model.hidden_size, model.experts, model.expert_hidden_size or 0


@dataclass(frozen=True)
class ExpertsLayer:
    """The weights of one layer; the router is fp32."""

    router_ED: Tensor
    router_bias_E: Tensor
    fc1_EGD: Tensor
    fc2_EDF: Tensor


class ExpertsDecoding(Decoding):
    """No memory: each token goes to the expert with the largest logit."""

    def pack(self, get: Any, model: ModelConfig, dtype: torch.dtype, device: Any) -> ExpertsLayer:
        import torch

        D, E, F = _sizes(model)
        fc1_EGD = torch.empty(E, 2 * F, D, dtype=dtype, device=device)
        fc2_EDF = torch.empty(E, D, F, dtype=dtype, device=device)
        for e in range(E):
            fc1_EGD[e] = get(f"local_experts.{e}.linear_fc1.weight", dtype)
            fc2_EDF[e] = get(f"local_experts.{e}.linear_fc2.weight", dtype)
        return ExpertsLayer(
            router_ED=get("router.weight"),
            router_bias_E=get("router.bias"),
            fc1_EGD=fc1_EGD,
            fc2_EDF=fc2_EDF,
        )

    def memory(self, model: ModelConfig, batch: int, dtype: torch.dtype, device: Any) -> list[Tensor]:
        return []

    def compiled(self, layer: ExpertsLayer, norm_D: Tensor, model: ModelConfig) -> Step:
        from megatron_blackmamba.ops.decoding import experts_step

        return experts_step(norm_D=norm_D, **vars(layer), activation=model.activation, eps=model.norm_eps)

    def bytes_a_token(self, layer: ExpertsLayer) -> int:
        experts = layer.fc1_EGD.nbytes + layer.fc2_EDF.nbytes
        return super().bytes_a_token(layer) - experts + experts // len(layer.fc1_EGD)

    def step(self, run: Runner, layer: ExpertsLayer, memory: list[Tensor], x_BD: Tensor) -> Tensor:
        best_B, choice_B = _route(layer, x_BD)
        y_BD = gathered(run, layer, x_BD, choice_B) if x_BD.is_cuda else chosen(run, layer, x_BD, choice_B.tolist())
        return y_BD * best_B.sigmoid()[:, None]

    def read(
        self,
        run: Runner,
        layer: ExpertsLayer,
        memory: list[Tensor],
        x_BLD: Tensor,
        keep_BL1: Tensor | None,
        reset_BL: Tensor | None,
    ) -> Tensor:
        x_TD = x_BLD.flatten(0, 1)
        best_T, choice_T = _route(layer, x_TD.float())
        return (_grouped(run, layer, x_TD, choice_T) * best_T.sigmoid()[:, None]).view_as(x_BLD)


def _route(layer: ExpertsLayer, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each token, and whose it is."""
    import torch.nn.functional as F

    best_T, choice_T = F.linear(x_TD, layer.router_ED, layer.router_bias_E).max(dim=-1)
    return best_T, choice_T


def gathered(run: Runner, layer: ExpertsLayer, x_BD: Tensor, choice_B: Tensor) -> Tensor:
    """As `chosen`, without asking the device for the choice: a captured step must not wait."""
    import torch

    E = len(layer.fc1_EGD)
    x = x_BD.to(layer.fc1_EGD.dtype)
    if len(x) < E:  # copy each row's expert
        x_B1D, fc1, fc2 = x[:, None], layer.fc1_EGD[choice_B], layer.fc2_EDF[choice_B]
    else:  # all experts for all rows read less than that
        x_B1D, fc1, fc2 = x.expand(E, *x.shape), layer.fc1_EGD, layer.fc2_EDF
    gate, up = torch.bmm(x_B1D, fc1.mT).chunk(2, dim=-1)
    y = torch.bmm(run.gate(gate.float()).mul(up).to(x.dtype), fc2.mT).float()
    return y[:, 0] if len(x) < E else y[choice_B, torch.arange(len(x), device=x.device)]


def chosen(run: Runner, layer: ExpertsLayer, x_BD: Tensor, choice_B: list[int]) -> Tensor:
    """Return the output of each row's expert; no other expert's weights are read."""
    experts = sorted(set(choice_B))
    if len(experts) == 1:
        return _expert(run, layer, x_BD, experts[0])
    y_BD = x_BD.new_empty(x_BD.shape)
    for expert in experts:
        rows = [row for row, choice in enumerate(choice_B) if choice == expert]
        y_BD[rows] = _expert(run, layer, x_BD[rows], expert)
    return y_BD


def _expert(run: Runner, layer: ExpertsLayer, x_BD: Tensor, expert: int) -> Tensor:
    gate, up = run.times(x_BD, layer.fc1_EGD[expert]).chunk(2, dim=-1)
    return run.times(run.gate(gate) * up, layer.fc2_EDF[expert])


def _grouped(run: Runner, layer: ExpertsLayer, x_TD: Tensor, choice_T: Tensor) -> Tensor:
    import torch

    from megatron_blackmamba.ops.experts import grouped_experts

    order_T = choice_T.argsort()
    tokens_E = (choice_T[:, None] == torch.arange(len(layer.fc1_EGD), device=choice_T.device)).sum(dim=0)
    y_TD = grouped_experts(
        x_TD[order_T].to(layer.fc1_EGD.dtype), tokens_E, layer.fc1_EGD, layer.fc2_EDF, activation=run.config.activation
    )
    return torch.empty_like(x_TD, dtype=torch.float32).index_copy_(0, order_T, y_TD.float())
