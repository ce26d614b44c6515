"""Matrix products in FP8 (e4m3): forward, and for the gradient of the input.

Each row that a product sums over has a scale of its own, taken from its largest value at that moment, so nothing is
kept between steps. The gradient of the weight stays a product in bf16: it sums over tokens, so FP8 would need the
largest value of each column, and another copy of both inputs.

Shapes: T tokens, D inputs, O outputs, E experts, R rows, C columns, G groups of rows.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops.arguments import require_dimensions, require_shape
from megatron_blackmamba.ops.gradients import first_order

BACKENDS = ("triton", "reference")  # of rounding; best first, each where it applies
MULTIPLE = 16
"""FP8 products take matrices whose sides are multiples of this."""
HOPPER = (9, 0)


def available_backends() -> dict[str, str | None]:
    """Name -> None where this machine can use it to round, else the reason why not."""
    return backends.available(__name__, BACKENDS)


def why_not() -> str | None:
    """Return why this machine cannot multiply in FP8, or None. CPUs can, slowly, with newer versions of torch."""
    if not torch.cuda.is_available():
        return _why_no_rows_on_cpus()
    if torch.cuda.get_device_capability() < HOPPER:
        return f"FP8 products need an H100 or a newer GPU; here is {torch.cuda.get_device_name()}"
    return (
        None
        if hasattr(torch, "_scaled_grouped_mm") and hasattr(F, "grouped_mm")
        else f"torch {torch.__version__} has no grouped FP8 products"
    )


@functools.cache
def _why_no_rows_on_cpus() -> str | None:
    one = torch.ones(MULTIPLE, MULTIPLE, dtype=torch.bfloat16)
    try:
        _times(one, one, fast=False)
    except RuntimeError:  # 2.9
        return f"torch {torch.__version__} has no FP8 products with a scale for each row on CPUs"
    return None


def fits(weight: Tensor) -> bool:
    """Return whether the sides of a weight `[..., O, D]` suit FP8 products."""
    return not any(size % MULTIPLE for size in weight.shape[-2:])


def fp8_linear(x: Tensor, weight_OD: Tensor) -> Tensor:
    """Return `x @ weight.T` in bf16, both rounded to FP8 row by row; the gradient of x likewise.

    Args:
        x: `[..., D]` in bf16.
        weight_OD: Weight in bf16 whose sides are multiples of 16.
    """
    _require_bf16("fp8_linear", x, weight_OD)
    require_dimensions("fp8_linear", "weight", weight_OD, 2)
    if not fits(weight_OD):
        raise ValueError(f"fp8_linear: the sides of weight {tuple(weight_OD.shape)} must be multiples of {MULTIPLE}")
    if x.numel() == 0:
        return F.linear(x, weight_OD)
    y_TO: Tensor = _Linear.apply(x.flatten(0, -2), weight_OD)
    return y_TO.view(*x.shape[:-1], -1)


def fp8_grouped_linear(x_TD: Tensor, ends_E: Tensor, weight_EOD: Tensor) -> Tensor:
    """Return `[T, O]`: the rows of x before the first end times the first weight, and so on, in FP8.

    Args:
        x_TD: Tokens sorted by expert, in bf16.
        ends_E: Sums of the first tokens per expert, in int32.
        weight_EOD: One weight per expert, in bf16, whose sides are multiples of 16.
    """
    _require_bf16("fp8_grouped_linear", x_TD, weight_EOD)
    require_dimensions("fp8_grouped_linear", "weight", weight_EOD, 3)
    require_shape("fp8_grouped_linear", "ends", ends_E, len(weight_EOD))
    if not fits(weight_EOD):
        raise ValueError(
            f"fp8_grouped_linear: the sides of weight {tuple(weight_EOD.shape)} must be multiples of {MULTIPLE}"
        )
    return _GroupedLinear.apply(x_TD, ends_E, weight_EOD)


def by_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round `[..., R, C]` to FP8: return numbers, contiguous, and scales `[..., R]` in fp32, whose product is x."""
    return backends.choose(__name__, BACKENDS, "auto", x).by_rows(x)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, weight_OD):
        ctx.save_for_backward(x_TD, weight_OD)
        return _times(x_TD, weight_OD, fast=True)

    @staticmethod
    @first_order
    def backward(ctx, grad_TO):
        x_TD, weight_OD = ctx.saved_tensors
        grad_x, grad_weight = ctx.needs_input_grad
        return (
            _times(grad_TO, weight_OD.t(), fast=False) if grad_x else None,
            grad_TO.t() @ x_TD if grad_weight else None,
        )


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, ends_E, weight_EOD):
        ctx.save_for_backward(x_TD, ends_E, weight_EOD)
        return _times_groups(x_TD, ends_E, weight_EOD, fast=True)

    @staticmethod
    @first_order
    def backward(ctx, grad_TO):
        x_TD, ends_E, weight_EOD = ctx.saved_tensors
        grad_x, _, grad_weight = ctx.needs_input_grad
        grad_TO = grad_TO.contiguous()
        return (
            _times_groups(grad_TO, ends_E, weight_EOD.mT, fast=False) if grad_x else None,
            None,
            F.grouped_mm(grad_TO.t(), x_TD, offs=ends_E) if grad_weight else None,
        )


def _times(x_TC: Tensor, weight_RC: Tensor, fast: bool) -> Tensor:
    """Return `x @ weight.T`. fast: add up in fewer bits, which is usual forward and too coarse for gradients."""
    x, x_scale = by_rows(x_TC)
    weight, scale = by_rows(weight_RC)
    return torch._scaled_mm(
        x, weight.t(), x_scale[:, None], scale[None], out_dtype=x_TC.dtype, use_fast_accum=fast and x.is_cuda
    )


def _times_groups(x_TC: Tensor, ends_G: Tensor, weight_GRC: Tensor, fast: bool) -> Tensor:
    if not x_TC.is_cuda:  # PyTorch has the grouped product for GPUs only
        counts = ends_G.diff(prepend=ends_G.new_zeros(1)).tolist()
        parts = zip(x_TC.split(counts), weight_GRC, strict=True)
        return torch.cat([_times(x, weight, fast) if len(x) else x.new_zeros(0, len(weight)) for x, weight in parts])
    x, x_scale = by_rows(x_TC)
    weight, scale = by_rows(weight_GRC)
    return torch._scaled_grouped_mm(
        x, weight.mT, x_scale, scale, offs=ends_G, out_dtype=x_TC.dtype, use_fast_accum=fast
    )


def _require_bf16(op: str, x: Tensor, weight: Tensor) -> None:
    if not x.dtype == weight.dtype == torch.bfloat16:
        raise ValueError(f"{op}: x is {x.dtype}, weight is {weight.dtype}. Pass both in torch.bfloat16.")
    require_shape(op, "x", x, *x.shape[:-1], weight.shape[-1])
