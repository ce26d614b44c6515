"""The causal depthwise convolution in C++ (csrc/causal_conv1d.cpp).

Shapes: B batch, L length, I inner channels, K taps, W = K - 1 the window, P channels padded to a multiple of 16.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops import library
from megatron_blackmamba.ops.backends import FP32_OR_BF16, Takes
from megatron_blackmamba.ops.causal_conv1d.inputs import Inputs
from megatron_blackmamba.ops.gradients import first_order
from megatron_blackmamba.ops.library import empty_like_rows, with_channels_contiguous

TAKES = Takes("cpu", FP32_OR_BF16)


def unsupported(inputs: Inputs) -> str | None:
    taps = inputs.weight_IK.shape[1]
    return None if taps in (2, 3, 4) else f"{taps} taps: 2, 3 and 4 are supported"


def convolve(inputs: Inputs) -> Tensor:
    x_BLI, weight_IK, bias_I, activation, initial_window_BWI, reset_BL = inputs
    return _Convolution.apply(
        x_BLI,
        weight_IK.float(),
        x_BLI.new_zeros(x_BLI.shape[2], dtype=torch.float32) if bias_I is None else bias_I.float(),
        activation == "silu",
        None if initial_window_BWI is None else initial_window_BWI.to(x_BLI.dtype),
        None if reset_BL is None else reset_BL.contiguous(),
    )


class _Arguments(library.Arguments):
    """struct CausalConv1d of csrc/causal_conv1d.h."""

    _fields_ = library.fields(
        "int64 B L I K is_bf16 silu threads; pointer x; strides x; pointer initial_window; strides initial_window;"
        "pointer weight bias reset y; strides y; pointer grad_y; strides grad_y; pointer grad_x grad_initial_window;"
        "strides grad_x grad_initial_window; pointer grad_weight grad_bias workspace"
    )


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_IK, bias, silu, initial_window, reset):
        x = with_channels_contiguous(x)
        padding = (0, -x.shape[2] % 16)
        weight_KP, bias_P = F.pad(weight_IK.t(), padding).contiguous(), F.pad(bias, padding)
        initial_window = None if initial_window is None else with_channels_contiguous(initial_window)
        y = empty_like_rows(x)
        saved = (x, weight_KP, bias_P, initial_window, reset)
        ctx.isa = library.isa()
        library.call("causal_conv1d_forward", _arguments(*saved, silu, y=y), ctx.isa)
        ctx.save_for_backward(*saved)
        ctx.silu = silu
        return y

    @staticmethod
    @first_order
    def backward(ctx, grad_y):
        saved = ctx.saved_tensors  # once: torch's checkpointing gives them no second time
        x, weight_KP, bias_P, initial_window, _ = saved
        (batch, _, inner), (K, P) = x.shape, weight_KP.shape
        grad_x = empty_like_rows(x)
        grad_initial_window = None if initial_window is None else torch.empty_like(initial_window)
        grad_weight, grad_bias = weight_KP.new_zeros(batch, K, P), bias_P.new_zeros(batch, P)
        arguments = _arguments(
            *saved,
            ctx.silu,
            grad_y=with_channels_contiguous(grad_y),
            grad_x=grad_x,
            grad_initial_window=grad_initial_window,
            grad_weight=grad_weight,
            grad_bias=grad_bias,
            workspace=weight_KP.new_zeros(batch, K - 1, P),
        )
        library.call("causal_conv1d_backward", arguments, ctx.isa)
        grad_weight_IK = grad_weight.sum(0)[:, :inner].t()
        return grad_x, grad_weight_IK, grad_bias.sum(0)[:inner], None, grad_initial_window, None


def _arguments(x, weight_KP, bias_P, initial_window, reset, silu, **others):
    (batch, length, inner), K = x.shape, weight_KP.shape[0]
    sizes = {"B": batch, "L": length, "I": inner, "K": K, "is_bf16": x.dtype == torch.bfloat16, "silu": silu}
    return _Arguments(**sizes, x=x, weight=weight_KP, bias=bias_P, initial_window=initial_window, reset=reset, **others)
