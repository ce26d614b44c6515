"""Gated activations in C++ (csrc/gated.cpp), one kernel each way.

Shapes: T tokens, F hidden units, G = 2F gate and up, gate first.
"""

import torch
from torch import Tensor

from megatron_blackmamba.ops import library
from megatron_blackmamba.ops.backends import FP32_OR_BF16, Takes
from megatron_blackmamba.ops.gradients import first_order

TAKES = Takes("cpu", FP32_OR_BF16)


def gated(gate_up_TG: Tensor, activation: str, weights_T: Tensor | None) -> Tensor:
    return _Gated.apply(gate_up_TG, weights_T, activation == "gelu")


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, weights, gelu):
        gate_up = gate_up.contiguous()
        weights = None if weights is None else weights.float().contiguous()
        y = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        library.call("gated_forward", _arguments(gate_up, weights, gelu, y=y))
        ctx.save_for_backward(gate_up, weights)
        ctx.gelu = gelu
        return y

    @staticmethod
    @first_order
    def backward(ctx, grad_y):
        gate_up, weights = ctx.saved_tensors
        grad_gate_up, grad_weights = torch.empty_like(gate_up), None if weights is None else torch.empty_like(weights)
        gradients = {"grad_y": grad_y.contiguous(), "grad_gate_up": grad_gate_up, "grad_weights": grad_weights}
        library.call("gated_backward", _arguments(gate_up, weights, ctx.gelu, **gradients))
        return grad_gate_up, grad_weights, None


def _arguments(gate_up, weights, gelu, **others):
    (T, G), is_bf16 = gate_up.shape, gate_up.dtype == torch.bfloat16
    return _Arguments(T=T, F=G // 2, is_bf16=is_bf16, gelu=gelu, gate_up=gate_up, weights=weights, **others)


class _Arguments(library.Arguments):
    """struct Gated of csrc/gated.h."""

    _fields_ = library.fields(
        "int64 T F is_bf16 gelu threads; pointer gate_up weights y grad_y grad_gate_up grad_weights"
    )
