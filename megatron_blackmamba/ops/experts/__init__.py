"""Feed-forward experts on tokens sorted by expert: one grouped matrix product for all of them.

Each expert computes fc2(activation(gate) * up) with [gate | up] = fc1(x), no bias. Weights are stacked as Megatron and
the released checkpoint hold them per expert: fc1 `[E, 2F, D]`, gate rows first; fc2 `[E, D, F]`. Without a gate, an
expert computes fc2(activation(fc1(x))), and G = F.

Shapes: T tokens, D model, E experts, F expert hidden, G = 2F gate and up, O out.
"""

import torch
from torch import Tensor

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops.arguments import require_dimensions, require_floats, require_shape
from megatron_blackmamba.ops.gated import ACTIVATIONS, activated, gated, is_fused

BACKENDS = ("grouped_mm", "loop", "fp8")  # best first, each where it applies; fp8 is never chosen by itself


def grouped_experts(
    x_TD: Tensor,
    tokens_per_expert_E: Tensor,
    fc1_EGD: Tensor,
    fc2_EDF: Tensor,
    weights_T: Tensor | None = None,
    *,
    activation: str = "silu",
    gate: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Return `[T, D]`: the output of each token's expert, times its weight. Experts and T may be empty.

    An expert computes `fc2 @ (activation(gate) * up)`, where `gate` and `up` are the halves of `fc1 @ x`. Letters name
    the dimensions: T tokens, D model, E experts, F hidden size of an expert, G = 2F.

    Args:
        x_TD: Tokens sorted by expert: first those of expert 0, then those of expert 1, and so on.
        tokens_per_expert_E: How many tokens each expert gets; integers that add up to T.
        fc1_EGD: First weight of each expert: F rows of the gate, then F rows of up.
        fc2_EDF: Second weight of each expert.
        weights_T: Factor of each token's output, such as the router's probability; 1 by default.
        activation: "silu", "gelu" or "relu2".
        gate: Whether fc1 has a gate. Without one, an expert computes `fc2 @ activation(fc1 @ x)`, and G = F.
        backend: "auto" or a key of `megatron_blackmamba.ops.experts.available_backends()`. "fp8" rounds bf16 tensors
            to FP8 (`megatron_blackmamba.ops.fp8`) and is never chosen by itself.
    """
    require_floats("grouped_experts", x=x_TD, fc1=fc1_EGD, fc2=fc2_EDF, weights=weights_T)
    require_dimensions("grouped_experts", "x", x_TD, 2)
    require_shape("grouped_experts", "weights", weights_T, len(x_TD))
    require_dimensions("grouped_experts", "fc1", fc1_EGD, 3)
    if activation not in ACTIVATIONS:
        raise ValueError(f"grouped_experts: activation must be one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    (experts, rows, _), hidden, halves = fc1_EGD.shape, x_TD.shape[1], 2 if gate else 1
    require_shape("grouped_experts", "fc1", fc1_EGD, experts, rows // halves * halves, hidden)
    require_shape("grouped_experts", "fc2", fc2_EDF, experts, hidden, rows // halves)
    ends_E = None
    if x_TD.is_cuda:  # once, out of the pinned memory that a dispatcher has copied to: the host does not wait
        tokens_per_expert_E = tokens_per_expert_E.to(x_TD.device, non_blocking=True)
        ends_E = tokens_per_expert_E.cumsum(0, dtype=torch.int32)
    gate_up_TG = grouped_linear(x_TD, tokens_per_expert_E, fc1_EGD, backend=backend, ends_E=ends_E)
    early = gate and is_fused(gate_up_TG, activation)  # there weights cost nothing; else they meet the smaller tensor
    hidden_TF = gated(gate_up_TG, activation, weights_T) if early else activated(gate_up_TG, activation, gate)
    y_TD = grouped_linear(hidden_TF, tokens_per_expert_E, fc2_EDF, backend=backend, ends_E=ends_E)
    return y_TD if early or weights_T is None else (y_TD * weights_T[:, None]).to(x_TD.dtype)


def grouped_linear(
    x_TD: Tensor,
    tokens_per_expert_E: Tensor,
    weight_EOD: Tensor,
    *,
    backend: str = "auto",
    ends_E: Tensor | None = None,
) -> Tensor:
    """Return `[T, O]`: the first tokens times the first weight, transposed, and so on.

    ends_E: The sums of the first tokens per expert, in int32, where known.
    """
    require_floats("grouped_linear", x=x_TD, weight=weight_EOD)
    if x_TD.dtype != weight_EOD.dtype:
        raise ValueError(f"grouped_linear: x is {x_TD.dtype}, weight is {weight_EOD.dtype}. Pass one dtype.")
    require_dimensions("grouped_linear", "weight", weight_EOD, 3)
    tokens, experts = x_TD.shape[0], weight_EOD.shape[0]
    require_shape("grouped_linear", "x", x_TD, tokens, weight_EOD.shape[2])
    if not isinstance(tokens_per_expert_E, Tensor) or tokens_per_expert_E.is_floating_point():
        raise ValueError("grouped_linear: tokens_per_expert must be a tensor of integers")
    if tokens_per_expert_E.shape != (experts,):
        raise ValueError(
            f"grouped_linear: {experts} weights, tokens_per_expert of shape {tuple(tokens_per_expert_E.shape)}"
        )
    if tokens_per_expert_E.device.type == "cpu":
        counts = tokens_per_expert_E.tolist()
        if sum(counts) != tokens or min(counts, default=0) < 0:
            raise ValueError(f"grouped_linear: tokens_per_expert {counts} are not counts that add up to {tokens}")
    if not tokens:
        backend = "loop"
    chosen = backends.choose(__name__, BACKENDS, backend, x_TD, weight_EOD)
    return chosen.grouped_linear(x_TD, tokens_per_expert_E, weight_EOD, ends_E)


def available_backends() -> dict[str, str | None]:
    """Name -> None where this machine can use it, else the reason why not."""
    return backends.available(__name__, BACKENDS)
