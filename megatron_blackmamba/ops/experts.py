"""Feed-forward experts on tokens sorted by expert: one grouped matrix product for all of them.

Each expert computes fc2(activation(gate) * up) with [gate | up] = fc1(x), no bias. Weights are stacked as Megatron and
the released checkpoint hold them per expert: fc1 `[E, 2F, D]`, gate rows first; fc2 `[E, D, F]`.

Shapes: T tokens, D model, E experts, F expert hidden, G = 2F gate and up, O out.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops.arguments import require_floats
from megatron_blackmamba.ops.gated import ACTIVATIONS, gated, is_fused
from megatron_blackmamba.ops.matvec import bf16_products, product

BACKENDS = ("grouped_mm", "loop")  # best first, each where it applies
ROW_ALIGNMENT = 16  # bytes, which grouped_mm asks of every row


def grouped_experts(
    x_TD: Tensor,
    tokens_per_expert_E: Tensor,
    fc1_EGD: Tensor,
    fc2_EDF: Tensor,
    weights_T: Tensor | None = None,
    *,
    activation: str = "silu",
    backend: str = "auto",
) -> Tensor:
    """Return `[T, D]`: the output of each token's expert, times its weight. Experts and T may be empty."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"grouped_experts: activation must be one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    require_floats("grouped_experts", x=x_TD, fc1=fc1_EGD, fc2=fc2_EDF, weights=weights_T)
    ends_E = None
    if x_TD.is_cuda:  # once, out of the pinned memory that a dispatcher has copied to: the host does not wait
        tokens_per_expert_E = tokens_per_expert_E.to(x_TD.device, non_blocking=True)
        ends_E = tokens_per_expert_E.cumsum(0, dtype=torch.int32)
    gate_up_TG = grouped_linear(x_TD, tokens_per_expert_E, fc1_EGD, backend=backend, ends_E=ends_E)
    early = is_fused(gate_up_TG)  # the weights cost nothing there; elsewhere they meet the smaller tensor
    hidden_TF = gated(gate_up_TG, activation, weights_T if early else None)
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
    tokens, experts = x_TD.shape[0], weight_EOD.shape[0]
    if tokens_per_expert_E.shape != (experts,):
        raise ValueError(
            f"grouped_linear: {experts} weights, tokens_per_expert of shape {tuple(tokens_per_expert_E.shape)}"
        )
    if tokens_per_expert_E.device.type == "cpu" and tokens_per_expert_E.sum() != tokens:
        raise ValueError(
            f"grouped_linear: tokens_per_expert {tokens_per_expert_E.tolist()} does not add up to {tokens}"
        )
    why_not = _why_not_grouped_mm(x_TD, weight_EOD)
    if backend == "loop" or (backend == "auto" and why_not) or tokens == 0:  # whose backward grouped_mm lacks
        parts = x_TD.split(tokens_per_expert_E.tolist())
        times = F.linear if torch.is_grad_enabled() or x_TD.is_cuda else product
        return torch.cat([times(part, weight) for part, weight in zip(parts, weight_EOD.unbind(), strict=True)])
    if backend not in ("auto", "grouped_mm"):
        raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}; not {backend!r}")
    if why_not:
        raise ValueError(f"grouped_mm cannot run here: {why_not}")
    if ends_E is None:
        ends_E = tokens_per_expert_E.to(x_TD.device).cumsum(0, dtype=torch.int32)
    y_TO = _grouped_mm()(x_TD.contiguous(), weight_EOD.contiguous().mT, offs=ends_E)
    if y_TO.requires_grad:
        y_TO.register_hook(torch.Tensor.contiguous)  # its backward refuses an expanded gradient
    return y_TO


def available_backends() -> dict[str, str | None]:
    """Name -> None where this machine can use it, else the reason why not."""
    return {"grouped_mm": None if _grouped_mm() else f"torch {torch.__version__} lacks grouped_mm", "loop": None}


def _why_not_grouped_mm(x_TD: Tensor, weight_EOD: Tensor) -> str | None:
    if reason := available_backends()["grouped_mm"]:
        return reason
    if x_TD.dtype not in (torch.bfloat16, torch.float32) or (x_TD.is_cuda and x_TD.dtype != torch.bfloat16):
        return f"{x_TD.dtype} on {x_TD.device.type}"
    if x_TD.is_cpu and x_TD.dtype == torch.bfloat16 and not torch.is_grad_enabled() and not bf16_products():
        return "this processor has no bf16 products, and without gradients `product` is faster"
    for size in weight_EOD.shape[1:]:
        if size * x_TD.element_size() % ROW_ALIGNMENT:
            return f"rows of {size} {x_TD.dtype} are not a multiple of {ROW_ALIGNMENT} bytes"
    return None


@cache
def _grouped_mm():
    return getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
