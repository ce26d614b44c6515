"""The square of ReLU in Triton, one kernel each way."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_blackmamba.ops.backends import UP_TO_FP32, Takes
from megatron_blackmamba.ops.gradients import first_order

TAKES = Takes("cuda", UP_TO_FP32)
BLOCK = 1024


def squared(x: Tensor) -> Tensor:
    return _Squared.apply(x)


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        squared_forward[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK=BLOCK)
        return y

    @staticmethod
    @first_order
    def backward(ctx, grad_y):
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        squared_backward[(triton.cdiv(x.numel(), BLOCK),)](x, grad_y.contiguous(), grad_x, x.numel(), BLOCK=BLOCK)
        return grad_x


@triton.jit
def squared_forward(x, y, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    positive = tl.maximum(tl.load(x + place, place < size, 0.0).to(tl.float32), 0.0)
    tl.store(y + place, positive * positive, place < size)


@triton.jit
def squared_backward(x, grad_y, grad_x, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    positive = tl.maximum(tl.load(x + place, place < size, 0.0).to(tl.float32), 0.0)
    tl.store(grad_x + place, 2 * positive * tl.load(grad_y + place, place < size, 0.0), place < size)
