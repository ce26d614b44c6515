"""Mixture of experts: a router, `model.top_k` experts per token, by default SwiGLU, and an optional shared expert.

The router kind decides which experts a token goes to (`routers`).

Shapes: B batch, L length, T = B * L tokens, K experts of a token, P = T * K token-expert pairs, D model, E experts.
F hidden size of an expert, G = 2F gate and up; without a gate, G = F.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from megatron_blackmamba import routers
from megatron_blackmamba.costs import FP32, INT64, Sizes, Work
from megatron_blackmamba.layers.base import Cannot, Decoding, Division, Inputs, LayerKind, Runner
from megatron_blackmamba.layers.mlp import kind as mlp
from megatron_blackmamba.layers.rows import Stack, Weight, whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_blackmamba.ops.decoding import Step
    from megatron_blackmamba.settings import ModelConfig


SMALL_KERNELS = (30, 20)
"""Launches forward and backward that last as long as a launch."""


class Experts(LayerKind):
    letter, name = "E", "mixture of experts"
    keys = ("experts", "top_k", "expert_hidden_size", "shared_expert_hidden_size", "router", "activation", "gated")
    block = "megatron_blackmamba.model.specs:experts_block"
    cut = None
    widens = True
    routed = True
    recompute = frozenset({"layers", "experts"})
    by_adam = ("router.weight",)
    writes_to_residual = ("fc2", "linear_fc2.weight")
    released = True
    entry = "a number of experts"

    @property
    def kept_in_fp32(self) -> tuple[str, ...]:  # type: ignore[override]
        return routers.states()

    def problems(self, model: ModelConfig) -> list[str]:
        router = routers.kind_of(model.router.kind)
        found = [] if model.expert_hidden_size else ["the pattern has E layers: set model.expert_hidden_size"]
        if router.use(model).biased and "expert_bias" not in router.state:
            found.append(f"the router kind {router.name} uses a bias: its state and module must have expert_bias")
        if model.router.z_loss and not router.learned:
            found.append(f"model.router.z_loss: the router kind {router.name} has no logits. Remove the key")
        return found + router.problems(model)

    def megatron(self, model: ModelConfig) -> dict[str, Any]:
        router = routers.kind_of(model.router.kind)
        # With a capacity, dispatchers count what they send instead of relying on top_k; our routers drop nothing.
        capacity = {} if router.every_token_gets_k else {"moe_expert_capacity_factor": 1.0}
        return {
            "num_moe_experts": model.experts,
            "moe_ffn_hidden_size": model.expert_hidden_size,
            "moe_shared_expert_intermediate_size": model.shared_expert_hidden_size,
            "moe_router_topk": model.top_k,
            "moe_router_pre_softmax": True,  # else megatron-core refuses top_k=1, whatever the router
            **capacity,
            **router.megatron(model),
        }

    def divisions(self, model: ModelConfig) -> list[Division]:
        return [
            Division("model.expert_hidden_size", model.expert_hidden_size or 0, "expert_tensor"),
            Division("model.experts", model.experts, "expert"),
            Division("model.shared_expert_hidden_size", model.shared_expert_hidden_size or 0, "tensor"),
        ]

    def parts(self, model: ModelConfig) -> dict[str, Fraction]:
        shared = {"shared_expert": Fraction(1)} if model.shared_expert_hidden_size else {}
        return {"router": Fraction(1), "experts": Fraction(model.top_k, model.experts), **shared}

    def part_of(self, parameter: str) -> str:
        parts = {"router.": "router", "shared_experts.": "shared_expert"}
        return next((part for start, part in parts.items() if parameter.startswith(start)), "experts")

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        D, E, F = _sizes(model)
        router = routers.kind_of(model.router.kind)
        found = {"router.weight": whole(D, experts=E)} if router.learned else {}
        found |= {"router.bias": whole(experts=E)} if router.learned and model.router.bias else {}
        found |= {f"router.{name}": whole(experts=E) for name in router.state}
        expert, shared = mlp.weights(model, F), model.shared_expert_hidden_size
        found |= {f"local_experts.{e}.{name}": weight for e in range(E) for name, weight in expert.items()}
        of_shared = mlp.weights(model, shared) if shared else {}
        return found | {f"shared_experts.{name}": weight for name, weight in of_shared.items()}

    def stacks(self, model: ModelConfig) -> dict[str, Stack]:
        _, E, F = _sizes(model)
        weights = mlp.weights(model, F).values()
        return {
            f"experts.fc{i}": Stack(weight, tuple(_expert_weight(e, i) for e in range(E)))
            for i, weight in enumerate(weights, 1)
        }

    def initial(self, name: str, shape: tuple[int, ...], model: ModelConfig, random: torch.Generator) -> Tensor | None:
        import torch

        return torch.zeros(shape) if name == "router.bias" or name in self.kept_in_fp32 else None

    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        D, _, F = _sizes(model)
        each = 2 * mlp.products(model) * D
        shared = {"shared_expert": each * size} if (size := model.shared_expert_hidden_size) else {}
        return {"router": routers.kind_of(model.router.kind).flops(model), "experts": model.top_k * each * F, **shared}

    def kept(self, at: Sizes) -> int:
        """Add up the router; the experts' input, gate and up, and product; and the shared expert, which is an MLP."""
        D, _, hidden = _sizes(at.model)
        F = hidden // at.expert_tensor
        expert = at.width * self._kept_by_expert(at.model, D, F) + FP32 + INT64
        shared = 0
        if at.model.shared_expert_hidden_size:
            shared = at.width * mlp.kept(at.model) * at.model.shared_expert_hidden_size // at.tensor
        router = routers.kind_of(at.model.router.kind).kept(at)
        return at.here * router + at.routed * expert + at.whole * shared

    def _kept_by_expert(self, model: ModelConfig, D: int, F: int) -> int:
        """Return the numbers kept for a token: the kernels compute the activation again, plain PyTorch keeps parts."""
        if model.gated and model.activation in ("silu", "gelu"):
            return D + 3 * F
        return 2 * D + (5 if model.gated else 2) * F  # the weight meets the output

    def traffic(self, at: Sizes, passes: int) -> dict[str, float]:
        """Return the traffic of the tokens to their experts and back, one copy per expert.

        If ranks share an expert, its tokens are gathered and its outputs summed. A shared expert is a dense MLP.
        """
        D = at.model.hidden_size
        tokens = at.here * at.model.top_k
        moved = {
            "expert": 2 * passes * tokens * (D * at.width + FP32),
            "expert_tensor": 2 * passes * at.routed * D * at.width,
            "tensor": (2 * passes + 1) * at.stream if at.model.shared_expert_hidden_size else 0.0,
        }
        for axis, volume in routers.kind_of(at.model.router.kind).traffic(at, passes).items():
            moved[axis] += volume
        return moved

    def work(self, at: Sizes) -> tuple[list[Work], list[Work]]:
        """Count router, sorting of the tokens, products and gate as the kernels for GPUs do them."""
        D, _, hidden = _sizes(at.model)
        F = hidden // at.expert_tensor
        stream, sorted_tokens = at.width * D * at.here, at.width * D * at.here * at.model.top_k
        rows = at.width * at.routed
        router = Work(stream, routers.kind_of(at.model.router.kind).flops(at.model) * at.here)
        G = F * (mlp.products(at.model) - 1)
        products = [Work(rows * (D + G), 2 * D * G * at.routed), Work(rows * (F + D), 2 * D * F * at.routed)]
        shared = []
        if size := at.model.shared_expert_hidden_size:
            width = at.width * at.whole * size // at.tensor
            shared = [Work(3 * width, 2 * mlp.products(at.model) * D * size * at.here)]
        forward = [router, *products, *shared, Work(3 * F * rows), Work(2 * sorted_tokens), Work(2 * sorted_tokens)]
        backward = [router, router, *products, *products, *shared, *shared, Work(5 * F * rows)]
        backward += [Work(2 * sorted_tokens), Work(2 * sorted_tokens), Work(3 * stream)]
        small = [Work(launches=kernels) for kernels in SMALL_KERNELS]
        return [*forward, small[0]], [*backward, small[1]]

    def paper_flops(self, model: ModelConfig, tokens: int) -> tuple[float, float] | None:
        if model.top_k > 1 or model.shared_expert_hidden_size or not model.gated:
            return None
        D, E, _ = _sizes(model)
        return D * E * (16 * D + 2), 16 * D * D + 2 * D * E

    def exported(self, model: ModelConfig) -> str | Cannot:
        answer = routers.kind_of(model.router.kind).exported(model)
        return answer if isinstance(answer, Cannot) else str(model.experts)

    def imported(self, entry: str) -> dict[str, Any] | None:
        return {"experts": int(entry)} if entry.isdecimal() and int(entry) > 0 else None

    def exported_fields(self, model: ModelConfig) -> dict[str, Any]:
        use = _use(model)
        return {
            "gated": model.gated,
            "num_experts_per_tok": model.top_k,
            "shared_expert_hidden_size": model.shared_expert_hidden_size,
            "router_kind": model.router.kind,
            "router_options": {
                key: getattr(model.router, key)
                for key in routers.kind_of(model.router.kind).keys
                if key not in ("scope", *routers.LOGITS)
            },
            "router_bias": model.router.bias and routers.kind_of(model.router.kind).learned,
            "router_scale": use.scale,
            "router_scores": use.scores,
            "router_normalized": use.normalized,
            "router_biased": use.biased,
            "router_bias_on_logits": use.bias_on_logits,
        }

    def imported_fields(self, content: Mapping[str, Any]) -> dict[str, Any]:
        names = {"top_k": "num_experts_per_tok", "shared_expert_hidden_size": "shared_expert_hidden_size"}
        fields = {ours: content[theirs] for ours, theirs in names.items() if theirs in content}
        router = {"kind": content.get("router_kind", "sinkhorn"), **(content.get("router_options") or {})}
        kind = routers.kind_of(router["kind"])
        router |= {
            key: content[f"router_{key}"] for key in routers.LOGITS if key in kind.keys and f"router_{key}" in content
        }
        return fields | {"router": router, "gated": content.get("gated", True)}

    def decoding(self, model: ModelConfig) -> Decoding | Cannot:
        exported = self.exported(model)
        return exported if isinstance(exported, Cannot) else ExpertsDecoding()


def _sizes(model: ModelConfig) -> tuple[int, int, int]:
    """Return D, E, F."""
    return model.hidden_size, model.experts, model.expert_hidden_size or 0


def _expert_weight(expert: int, linear: int) -> str:
    return f"local_experts.{expert}.linear_fc{linear}.weight"


@dataclass(frozen=True)
class ExpertsLayer:
    """The weights of one layer; the router is fp32, and empty if it learns nothing."""

    router_ED: Tensor
    router_bias_E: Tensor
    fc1_EGD: Tensor
    fc2_EDF: Tensor


@dataclass(frozen=True)
class RoutedLayer(ExpertsLayer):
    """The weights of a layer with another router than the paper's, or with a shared expert; empty if unused."""

    expert_bias_E: Tensor
    shared_fc1_GD: Tensor
    shared_fc2_DF: Tensor


class ExpertsDecoding(Decoding):
    """No memory: each token finds its experts by itself, as its router kind says."""

    routes = True

    def pack(self, get: Any, model: ModelConfig, dtype: torch.dtype, device: Any) -> ExpertsLayer:
        import torch

        _, E, F = _sizes(model)
        fc1_EGD, fc2_EDF = (
            torch.empty(E, *weight.shape, dtype=dtype, device=device) for weight in mlp.weights(model, F).values()
        )
        for e in range(E):
            fc1_EGD[e] = get(_expert_weight(e, 1), dtype)
            fc2_EDF[e] = get(_expert_weight(e, 2), dtype)
        none, learned = torch.empty(0, dtype=dtype, device=device), routers.kind_of(model.router.kind).learned
        weights = {"router_ED": get("router.weight") if learned else none, "router_bias_E": none}
        if learned:
            weights["router_bias_E"] = get("router.bias") if model.router.bias else torch.zeros(E, device=device)
        weights |= {"fc1_EGD": fc1_EGD, "fc2_EDF": fc2_EDF}
        if is_papers(model):
            return ExpertsLayer(**weights)
        shared = bool(model.shared_expert_hidden_size)
        return RoutedLayer(
            **weights,
            expert_bias_E=get("router.expert_bias") if _use(model).biased else none,
            shared_fc1_GD=get("shared_experts.linear_fc1.weight", dtype) if shared else none,
            shared_fc2_DF=get("shared_experts.linear_fc2.weight", dtype) if shared else none,
        )

    def memory(self, model: ModelConfig, batch: int, dtype: torch.dtype, device: Any) -> list[Tensor]:
        return []

    def choice(self, layer: ExpertsLayer, x_TD: Tensor, inputs: Inputs, model: ModelConfig) -> Tensor:
        return self.route(layer, x_TD, inputs, model).chosen

    def route(self, layer: ExpertsLayer, x_TD: Tensor, inputs: Inputs, model: ModelConfig) -> routers.Routed:
        """Return the weights and the experts of each token, `[T, K]`."""
        import torch.nn.functional as F

        kind = routers.kind_of(model.router.kind)
        if kind.learned:
            logits_TE = F.linear(x_TD, layer.router_ED, layer.router_bias_E)
        else:
            logits_TE = x_TD.new_zeros(len(x_TD), model.experts)
        bias_E = layer.expert_bias_E if isinstance(layer, RoutedLayer) else None
        choice_TK = self.choose(kind, logits_TE, routers.Tokens(model, inputs.ids.flatten(), bias_E))
        return routers.Routed(model.experts, choice_TK, kind.use(model).weights(logits_TE, choice_TK), x_TD)

    def choose(self, kind: routers.RouterKind, logits_TE: Tensor, at: routers.Tokens) -> Tensor:
        """Return the experts that each token finds by itself, `[T, K]`."""
        return routers.largest(kind.selecting(logits_TE, at), at.model.top_k)

    def compiled(self, layer: ExpertsLayer, norm_D: Tensor, model: ModelConfig) -> Step | None:
        from megatron_blackmamba.ops.decoding import experts_step

        use = _use(model)
        if not _is_simple(model) or use.scores != "sigmoid" or use.normalized or use.scale != 1:
            return None
        bias_E = layer.expert_bias_E if use.biased and isinstance(layer, RoutedLayer) else None
        weights = {name: getattr(layer, name) for name in ExpertsLayer.__dataclass_fields__}
        return experts_step(
            norm_D=norm_D, **weights, activation=model.activation, eps=model.norm_eps,
            choice_bias_E=bias_E, bias_on_scores=use.biased and not use.bias_on_logits,
        )  # fmt: skip

    def bytes_a_token(self, layer: ExpertsLayer, model: ModelConfig) -> int:
        experts = layer.fc1_EGD.nbytes + layer.fc2_EDF.nbytes
        return super().bytes_a_token(layer, model) - experts + experts // model.experts * model.top_k

    def step(self, run: Runner, layer: ExpertsLayer, memory: list[Tensor], x_BD: Tensor, inputs: Inputs) -> Tensor:
        routed = self.route(layer, x_BD, inputs, run.config)
        choice_P, x_PD = routed.chosen.flatten(), x_BD.repeat_interleave(run.config.top_k, dim=0)
        y_PD = (
            chosen(run, layer, x_PD, choice_P.tolist())
            if x_BD.device.type == "cpu"
            else gathered(run, layer, x_PD, choice_P)
        )
        y_BD = _weighed(y_PD, routed.weights)
        if not run.config.shared_expert_hidden_size:
            return y_BD
        assert isinstance(layer, RoutedLayer)
        return y_BD + run.times(run.activated(run.times(x_BD, layer.shared_fc1_GD)), layer.shared_fc2_DF)

    def read(self, run: Runner, layer: ExpertsLayer, memory: list[Tensor], x_BLD: Tensor, inputs: Inputs) -> Tensor:
        import torch.nn.functional as F

        x_TD = x_BLD.flatten(0, 1)
        routed = self.route(layer, x_TD.float(), inputs, run.config)
        y_TD = _weighed(_grouped(run, layer, x_TD, routed.chosen), routed.weights)
        if run.config.shared_expert_hidden_size:
            assert isinstance(layer, RoutedLayer)
            hidden = run.activated(F.linear(x_TD.to(layer.shared_fc1_GD.dtype), layer.shared_fc1_GD))
            y_TD = y_TD + F.linear(hidden, layer.shared_fc2_DF).float()
        return y_TD.view_as(x_BLD)


def is_papers(model: ModelConfig) -> bool:
    """Return whether the layer is the paper's: one gated expert a token, scaled by the sigmoid of its logit."""
    return _is_simple(model) and _use(model) == routers.Use("sigmoid")


def _is_simple(model: ModelConfig) -> bool:
    """Return whether the layer is one gated expert a token, whichever the router."""
    gated = model.gated and model.activation in ("silu", "gelu")
    return gated and model.top_k == 1 and not model.shared_expert_hidden_size


def _use(model: ModelConfig) -> routers.Use:
    return routers.kind_of(model.router.kind).use(model)


def _weighed(y_PD: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the weighted sums of each token's outputs, which follow one another in y_PD."""
    return (y_PD.unflatten(0, weights_TK.shape) * weights_TK[..., None]).sum(dim=1)


def gathered(run: Runner, layer: ExpertsLayer, x_BD: Tensor, choice_B: Tensor) -> Tensor:
    """Compute the same as `chosen` without reading the choice on the host: a captured step must not wait."""
    import torch

    E = len(layer.fc1_EGD)
    x = x_BD.to(layer.fc1_EGD.dtype)
    if len(x) < E:  # copy each row's expert
        x_B1D, fc1, fc2 = x[:, None], layer.fc1_EGD[choice_B], layer.fc2_EDF[choice_B]
    else:  # all experts for all rows read less than that
        x_B1D, fc1, fc2 = x.expand(E, *x.shape), layer.fc1_EGD, layer.fc2_EDF
    y = torch.bmm(run.activated(torch.bmm(x_B1D, fc1.mT).float()).to(x.dtype), fc2.mT).float()
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
    return run.times(run.activated(run.times(x_BD, layer.fc1_EGD[expert])), layer.fc2_EDF[expert])


def _grouped(run: Runner, layer: ExpertsLayer, x_TD: Tensor, choice_TK: Tensor) -> Tensor:
    """Return the output of each of a token's experts, `[T * K, D]`."""
    import torch

    from megatron_blackmamba.ops.experts import grouped_experts

    choice_P, K = choice_TK.flatten(), choice_TK.shape[1]
    order_P = choice_P.argsort()
    tokens_E = (choice_P[:, None] == torch.arange(len(layer.fc1_EGD), device=choice_P.device)).sum(dim=0)
    x_PD = x_TD[order_P // K].to(layer.fc1_EGD.dtype)
    activation, gate = run.config.activation, run.config.gated
    y_PD = grouped_experts(x_PD, tokens_E, layer.fc1_EGD, layer.fc2_EDF, activation=activation, gate=gate)
    return torch.empty_like(y_PD, dtype=torch.float32).index_copy_(0, order_P, y_PD.float())
