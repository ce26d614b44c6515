"""RMS norm over the last dimension, of fp32 inputs: one kernel of C++ or Triton where it applies, else PyTorch's.

Shapes: T tokens, D channels, U units of tokens.
"""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops import backends, library
from megatron_blackmamba.ops.arguments import require_floats, require_shape
from megatron_blackmamba.ops.gradients import first_order

ROWS_OF_A_UNIT = 64  # as in csrc/rms_norm.cpp


def available_backends() -> dict[str, str | None]:
    """Return the backends, each with None if this machine can use it, or with the reason why not."""
    return backends.fused("rms_norm")


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight, computed in fp32 (float64 if x is), in the weight's dtype."""
    require_floats("rms_norm", x=x, weight=weight_D)
    require_shape("rms_norm", "weight", weight_D, x.shape[-1])
    if triton := backends.triton_of("rms_norm", x, weight_D):
        return triton.norm_and_stream(x, weight_D, eps)[0]
    if why_not_cpp(x, weight_D):
        compute = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(compute), weight_D.shape, weight_D.to(compute), eps).to(weight_D.dtype)
    return _RmsNorm.apply(x, weight_D, eps)


def norm_and_stream(x: Tensor, weight_D: Tensor, eps: float, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the norm of x + branch, and this sum to go on with. One kernel does both where it can, each way."""
    require_floats("rms_norm", x=x, weight=weight_D, branch=branch)
    require_shape("rms_norm", "weight", weight_D, x.shape[-1])
    require_shape("rms_norm", "branch", branch, *x.shape)
    if triton := backends.triton_of("rms_norm", x, weight_D, branch):
        both: tuple[Tensor, Tensor] = triton.norm_and_stream(x, weight_D, eps, branch)
        return both
    stream = x if branch is None else x + branch
    return rms_norm(stream, weight_D, eps), stream


def why_not_cpp(x: Tensor, weight_D: Tensor) -> str | None:
    if x.device.type != "cpu" or x.dtype != torch.float32 or weight_D.dtype not in (torch.float32, torch.bfloat16):
        return f"{x.dtype} with weights in {weight_D.dtype} on {x.device.type}"
    return library.unavailable()


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        x = x.contiguous()
        y = torch.empty_like(x, dtype=weight.dtype)
        scale_T = x.new_empty(x.shape[:-1])
        library.call("rms_norm_forward", _arguments(x, weight, scale_T, eps, y=y), library.isa())
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
        library.call("rms_norm_backward", _arguments(x, weight, scale_T, ctx.eps, **gradients), library.isa())
        return grad_x, grad_weight_UD.sum(0).to(weight.dtype), None


def _arguments(x, weight, scale_T, eps, **others):
    arguments = _Arguments(T=scale_T.numel(), D=x.shape[-1], is_bf16=weight.dtype == torch.bfloat16, eps=eps)
    arguments.set(threads=torch.get_num_threads(), x=x, weight=weight.float(), scale=scale_T, **others)
    return arguments


class _Arguments(library.Arguments):
    """struct RmsNorm of csrc/rms_norm.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("T", "D", "is_bf16", "threads")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("x", "weight", "y", "scale", "grad_y", "grad_x", "grad_weight")),
    )
