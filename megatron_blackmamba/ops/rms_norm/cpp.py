"""RMS norm over the last dimension in C++ (csrc/rms_norm.cpp), one kernel each way.

Shapes: T tokens, D channels, U units of tokens.
"""

import torch
from torch import Tensor

from megatron_blackmamba.ops import library
from megatron_blackmamba.ops.backends import FP32_OR_BF16, Takes
from megatron_blackmamba.ops.gradients import first_order

ROWS_OF_A_UNIT = 64  # as in csrc/rms_norm.cpp
TAKES = Takes("cpu", (torch.float32,))


def unsupported(x: Tensor, weight_D: Tensor) -> str | None:
    return None if weight_D.dtype in FP32_OR_BF16 else f"weights in {weight_D.dtype}"


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return _RmsNorm.apply(x, weight_D, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        x = x.contiguous()
        y = torch.empty_like(x, dtype=weight.dtype)
        scale_T = x.new_empty(x.shape[:-1])
        library.call("rms_norm_forward", _arguments(x, weight, scale_T, eps, y=y))
        ctx.save_for_backward(x, weight, scale_T)
        ctx.eps = eps
        return y

    @staticmethod
    @first_order
    def backward(ctx, grad_y):
        x, weight, scale_T = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weight_UD = x.new_empty(-(-scale_T.numel() // ROWS_OF_A_UNIT), x.shape[-1])
        gradients = {"grad_y": grad_y.contiguous(), "grad_x": grad_x, "grad_weight": grad_weight_UD}
        library.call("rms_norm_backward", _arguments(x, weight, scale_T, ctx.eps, **gradients))
        return grad_x, grad_weight_UD.sum(0).to(weight.dtype), None


def _arguments(x, weight, scale_T, eps, **others):
    T, D, is_bf16 = scale_T.numel(), x.shape[-1], weight.dtype == torch.bfloat16
    return _Arguments(T=T, D=D, is_bf16=is_bf16, eps=eps, x=x, weight=weight.float(), scale=scale_T, **others)


class _Arguments(library.Arguments):
    """struct RmsNorm of csrc/rms_norm.h."""

    _fields_ = library.fields(
        "int64 T D is_bf16 threads; float eps; pointer x weight y scale grad_y grad_x grad_weight"
    )
