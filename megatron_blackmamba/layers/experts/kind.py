"""Mixture of experts: a router, `model.top_k` experts per token, by default SwiGLU, and an optional shared expert.

The router kind decides which experts a token goes to (`routers`). With `model.latent_size` a token goes there narrower:
one linear of the layer comes before the experts and one behind them. Each rank has both of them whole: it projects its
own tokens, so that only the narrow ones are exchanged.

Shapes: B batch, L length, T = B * L tokens, K experts of a token, P = T * K token-expert pairs, D model, E experts.
W width of an expert's input and output, F its hidden size, G = 2F gate and up; without a gate, G = F.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from megatron_blackmamba import routers
from megatron_blackmamba.layers.base import Cannot, Division, LayerKind
from megatron_blackmamba.layers.mlp import kind as mlp
from megatron_blackmamba.layers.rows import Stack, Weight, whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_blackmamba.settings import ModelConfig


SMALL_KERNELS = (30, 20)
"""Launches forward and backward that last as long as a launch."""


class Experts(LayerKind):
    letter, name = "E", "mixture of experts"
    keys = (
        *("experts", "top_k", "expert_hidden_size", "shared_expert_hidden_size", "latent_size", "router"),
        *("activation", "gated"),
    )
    mixer = "megatron_blackmamba.layers.experts.mixer:MoEMixer"
    cost = "megatron_blackmamba.layers.experts.cost:ExpertsCost"
    decode = "megatron_blackmamba.layers.experts.decode:ExpertsDecoding"
    cut = None
    widens = True
    routed = True
    recompute = frozenset({"layers", "experts"})
    writes_to_residual = ("fc2", "linear_fc2.weight", "latent_up.weight")
    released = True
    entry = "a number of experts"
    form = entry

    @property
    def kept_in_fp32(self) -> tuple[str, ...]:  # type: ignore[override]
        return routers.states()

    @property
    def by_adam(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("router.weight", *(f"router.{name}" for kind in routers.all_kinds() for name in kind.by_adam))

    def problems(self, model: ModelConfig) -> list[str]:
        router = routers.kind_of(model.router.kind)
        found = [] if model.expert_hidden_size else ["the pattern has E layers: set model.expert_hidden_size"]
        if router.use(model).biased and "expert_bias" not in router.state:
            found.append(f"the router kind {router.name} uses a bias: its state and module must have expert_bias")
        if model.router.z_loss and not router.learned:
            found.append(f"model.router.z_loss: the router kind {router.name} has no logits. Remove the key")
        if "scope" in router.keys and model.router.scope not in router.scopes:
            scopes = " or ".join(router.scopes)
            found.append(f"model.router.scope={model.router.scope}: the router kind {router.name} has {scopes}")
        return found + _wrong_groups(model) + router.problems(model)

    def megatron(self, model: ModelConfig) -> dict[str, Any]:
        router = routers.kind_of(model.router.kind)
        # With a capacity, dispatchers count what they send instead of relying on top_k; our routers drop nothing.
        capacity = {} if router.gets_k(model) else {"moe_expert_capacity_factor": 1.0}
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
        latent = {"latent": Fraction(1)} if model.latent_size else {}
        return {"router": Fraction(1), "experts": computed(model) / model.experts, **latent, **shared}

    def part_of(self, parameter: str) -> str:
        parts = {"router.": "router", "latent_": "latent", "shared_experts.": "shared_expert"}
        return next((part for start, part in parts.items() if parameter.startswith(start)), "experts")

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        D, E, W, F = sizes(model)
        router = routers.kind_of(model.router.kind)
        choices = router.choices(model)
        found = {"router.weight": whole(router.inputs(model), experts=choices)} if router.learned else {}
        found |= {f"router.{name}": whole(*shape[1:], units=shape[0]) for name, shape in router.inside(model).items()}
        found |= {"router.bias": whole(experts=choices)} if router.learned and model.router.bias else {}
        found |= {f"router.{name}": whole(experts=choices) for name in router.state}
        if model.latent_size:
            found |= {"latent_down.weight": whole(D, latent=W), "latent_up.weight": whole(W, out=D)}
        expert, shared = mlp.weights(model, F, W), model.shared_expert_hidden_size
        found |= {f"local_experts.{e}.{name}": weight for e in range(E) for name, weight in expert.items()}
        of_shared = mlp.weights(model, shared) if shared else {}
        return found | {f"shared_experts.{name}": weight for name, weight in of_shared.items()}

    def stacks(self, model: ModelConfig) -> dict[str, Stack]:
        _, E, W, F = sizes(model)
        weights = mlp.weights(model, F, W).values()
        return {
            f"experts.fc{i}": Stack(weight, tuple(expert_weight(e, i) for e in range(E)))
            for i, weight in enumerate(weights, 1)
        }

    def initial(self, name: str, shape: tuple[int, ...], model: ModelConfig, random: torch.Generator) -> Tensor | None:
        import torch

        if name.startswith("router."):
            own = routers.kind_of(model.router.kind).initial(name.removeprefix("router."), shape, random)
            if own is not None:
                return own
        return torch.zeros(shape) if name.endswith("bias") or name in self.kept_in_fp32 else None

    def carried(self, model: ModelConfig) -> int:
        return routers.kind_of(model.router.kind).carried(model)

    def exported(self, model: ModelConfig) -> str | Cannot:
        answer = routers.kind_of(model.router.kind).exported(model)
        return answer if isinstance(answer, Cannot) else str(model.experts)

    def imported(self, entry: str) -> dict[str, Any] | None:
        return {"experts": int(entry)} if entry.isdecimal() and int(entry) > 0 else None

    def exported_fields(self, model: ModelConfig) -> dict[str, Any]:
        use = use_of(model)
        return {
            "gated": model.gated,
            "num_experts_per_tok": model.top_k,
            "shared_expert_hidden_size": model.shared_expert_hidden_size,
            "latent_size": model.latent_size,
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
        same = ("shared_expert_hidden_size", "latent_size")
        names = {"top_k": "num_experts_per_tok", **dict(zip(same, same, strict=True))}
        fields = {ours: content[theirs] for ours, theirs in names.items() if theirs in content}
        router = {"kind": content.get("router_kind", "sinkhorn"), **(content.get("router_options") or {})}
        kind = routers.kind_of(router["kind"])
        router |= {
            key: content[f"router_{key}"] for key in routers.LOGITS if key in kind.keys and f"router_{key}" in content
        }
        return fields | {"router": router, "gated": content.get("gated", True)}


def sizes(model: ModelConfig) -> tuple[int, int, int, int]:
    """Return D, E, W, F."""
    return model.hidden_size, model.experts, model.routed_size, model.expert_hidden_size or 0


def computed(model: ModelConfig) -> Fraction:
    """Return how many experts compute for a token, if choices have equal shares: one that skips computes nothing."""
    return Fraction(model.top_k * model.experts, routers.kind_of(model.router.kind).choices(model))


def _wrong_groups(model: ModelConfig) -> list[str]:
    groups, chosen = model.router.groups, model.router.group_top_k
    if groups == 1:
        return [] if chosen == 1 else [f"model.router.group_top_k={chosen} needs model.router.groups"]
    if model.experts % groups:
        return [f"model.experts={model.experts} is not divisible by model.router.groups={groups}"]
    each = model.experts // groups
    if chosen > groups or model.top_k % chosen or model.top_k > chosen * each:
        return [
            f"model.top_k={model.top_k}: from model.router.group_top_k={chosen} of {groups} groups of {each} experts,"
            f" top_k must be a multiple of group_top_k, and at most {each} times it"
        ]
    return []


def expert_weight(expert: int, linear: int) -> str:
    return f"local_experts.{expert}.linear_fc{linear}.weight"


def is_simple(model: ModelConfig) -> bool:
    """Return whether the layer is a plain router and one gated expert a token, and nothing else."""
    if not routers.kind_of(model.router.kind).is_plain:
        return False
    gated = model.gated and model.activation in ("silu", "gelu")
    return gated and model.top_k == 1 and not model.shared_expert_hidden_size and not model.latent_size


def use_of(model: ModelConfig) -> routers.Use:
    return routers.kind_of(model.router.kind).use(model)
