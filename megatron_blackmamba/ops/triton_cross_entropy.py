"""The cross entropy of each token in Triton: it keeps the logits, and their gradient takes their place.

A program takes one token. Forward it reads the logits once, with a running maximum; backward it reads and overwrites
them. Row offsets are 64 bits wide: 38 sequences of 2,048 tokens have more than 2^31 logits.

Shapes: T tokens, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_blackmamba.ops.triton_support import interpreted, unavailable

__all__ = ["cross_entropy", "unavailable", "unsupported"]

BLOCK_V = 4096
LOWEST = tl.constexpr(-1e38)


def unsupported(logits_TV: Tensor) -> str | None:
    if not logits_TV.is_cuda and not interpreted():
        return "the tensors are not on a CUDA device"
    return "computes in float32, the input is float64" if logits_TV.dtype == torch.float64 else None


def cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    return _CrossEntropy.apply(logits_TV, labels_T)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels):
        logits, labels = logits.contiguous(), labels.contiguous()
        loss, log_sum = logits.new_empty((2, len(labels)), dtype=torch.float32)
        if len(labels):
            with torch.cuda.device_of(logits):
                loss_forward[(len(labels),)](logits, labels, loss, log_sum, **_options(logits))
        ctx.save_for_backward(logits, labels, log_sum)
        ctx.overwritten = False
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss):
        if ctx.overwritten:
            raise RuntimeError("cross_entropy: its gradient overwrites the logits, so backward runs only once")
        ctx.overwritten = True
        logits, labels, log_sum = ctx.saved_tensors
        if len(labels):
            with torch.cuda.device_of(logits):
                loss_backward[(len(labels),)](logits, labels, log_sum, grad_loss.contiguous(), **_options(logits))
        return logits, None


def _options(logits: Tensor) -> dict[str, int]:
    V = logits.shape[1]
    return {"V": V, "BLOCK": min(BLOCK_V, triton.next_power_of_2(V)), "num_warps": 8}


@triton.jit
def loss_forward(logits_TV, labels_T, loss_T, log_sum_T, V: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the loss of a row; each block element keeps its own maximum and sum, so threads synchronise once."""
    t = tl.program_id(0).to(tl.int64)
    largest = tl.full((BLOCK,), LOWEST, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, V, BLOCK):
        v = first + tl.arange(0, BLOCK)
        x = tl.load(logits_TV + t * V + v, mask=v < V, other=LOWEST).to(tl.float32)
        x = tl.where(v < V, x, LOWEST)
        grown = tl.maximum(largest, x)
        sums = sums * tl.exp(largest - grown) + tl.where(v < V, tl.exp(x - grown), 0.0)
        largest = grown
    top = tl.max(largest, 0)
    log_sum = top + tl.log(tl.sum(sums * tl.exp(largest - top), 0))
    label = tl.load(labels_T + t)
    tl.device_assert((label >= 0) & (label < V), "a label outside the vocabulary")
    tl.store(loss_T + t, log_sum - tl.load(logits_TV + t * V + label).to(tl.float32))
    tl.store(log_sum_T + t, log_sum)


@triton.jit
def loss_backward(logits_TV, labels_T, log_sum_T, grad_T, V: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    label, log_sum, grad = tl.load(labels_T + t), tl.load(log_sum_T + t), tl.load(grad_T + t)
    for first in range(0, V, BLOCK):
        v = first + tl.arange(0, BLOCK)
        x = tl.load(logits_TV + t * V + v, mask=v < V, other=0.0).to(tl.float32)
        share = tl.exp(x - log_sum) - tl.where(v == label, 1.0, 0.0)
        tl.store(logits_TV + t * V + v, (share * grad).to(logits_TV.dtype.element_ty), mask=v < V)
