"""Gated activations in Triton: activation(gate) * up * weight of the token, one kernel forward and one backward.

A program takes one token: it reads gate and up once, and in the backward pass adds up the gradient of the token's
weight in registers.

Shapes: T tokens, F hidden units, G = 2F gate and up, gate first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_blackmamba.ops.backends import UP_TO_FP32, Takes
from megatron_blackmamba.ops.gradients import first_order
from megatron_blackmamba.ops.triton_math import INVERSE_ROOT_2, sigmoid

TAKES = Takes("cuda", UP_TO_FP32)
BLOCK_F = 1024
DENSITY = tl.constexpr(0.3989422804014327)


def gated(gate_up_TG: Tensor, activation: str, weights_T: Tensor | None) -> Tensor:
    return _Gated.apply(gate_up_TG, weights_T, activation == "gelu")


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, weights, gelu):
        gate_up = gate_up.contiguous()
        weights = None if weights is None else weights.contiguous()
        T, G = gate_up.shape
        y = gate_up.new_empty(T, G // 2)
        if T:
            with torch.cuda.device_of(gate_up):
                gate_forward[(T,)](gate_up, weights, y, **_options(G // 2, weights, gelu))
        ctx.save_for_backward(gate_up, weights)
        ctx.gelu = gelu
        return y

    @staticmethod
    @first_order
    def backward(ctx, grad_y):
        gate_up, weights = ctx.saved_tensors
        T, G = gate_up.shape
        grad_gate_up = torch.empty_like(gate_up)
        grad_weights = None if weights is None else torch.empty_like(weights)
        if T:
            with torch.cuda.device_of(gate_up):
                gate_backward[(T,)](
                    gate_up, weights, grad_y.contiguous(), grad_gate_up, grad_weights,
                    **_options(G // 2, weights, ctx.gelu),
                )  # fmt: skip
        return grad_gate_up, grad_weights, None


def _options(F: int, weights: Tensor | None, gelu: bool) -> dict[str, int | bool]:
    return {"F": F, "BLOCK": min(BLOCK_F, triton.next_power_of_2(F)), "WEIGHTED": weights is not None, "GELU": gelu}


@triton.jit
def _activation(gate, GELU: tl.constexpr):
    """Return the activation and its derivative."""
    if GELU:
        share = 0.5 * (1.0 + tl.erf(gate * INVERSE_ROOT_2))
        return gate * share, share + gate * DENSITY * tl.exp(-0.5 * gate * gate)
    share = sigmoid(gate)
    return gate * share, share * (1.0 + gate * (1.0 - share))


@triton.jit
def gate_forward(
    gate_up_TG, weights_T, y_TF, F: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, GELU: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights_T + t).to(tl.float32) if WEIGHTED else 1.0
    for first in range(0, F, BLOCK):
        f = first + tl.arange(0, BLOCK)
        inside = f < F
        gate = tl.load(gate_up_TG + t * 2 * F + f, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up_TG + t * 2 * F + F + f, mask=inside, other=0.0).to(tl.float32)
        value, _ = _activation(gate, GELU)
        tl.store(y_TF + t * F + f, (value * up * weight).to(y_TF.dtype.element_ty), mask=inside)


@triton.jit
def gate_backward(
    gate_up_TG, weights_T, grad_y_TF, grad_gate_up_TG, grad_weights_T,
    F: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights_T + t).to(tl.float32) if WEIGHTED else 1.0
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, F, BLOCK):
        f = first + tl.arange(0, BLOCK)
        inside = f < F
        gate = tl.load(gate_up_TG + t * 2 * F + f, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up_TG + t * 2 * F + F + f, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_y_TF + t * F + f, mask=inside, other=0.0).to(tl.float32)
        value, slope = _activation(gate, GELU)
        sums += grad * value * up
        grad *= weight
        out = grad_gate_up_TG + t * 2 * F + f
        tl.store(out, (grad * up * slope).to(grad_gate_up_TG.dtype.element_ty), mask=inside)
        tl.store(out + F, (grad * value).to(grad_gate_up_TG.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(grad_weights_T + t, tl.sum(sums, 0).to(grad_weights_T.dtype.element_ty))
