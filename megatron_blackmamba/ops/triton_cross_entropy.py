"""The cross entropy of each token in Triton, and in place of the logits its gradient but for the loss's own.

A program takes one token. It reads the logits twice, first for their maximum and sum. So few programs are at work at
once that the second read comes from the L2 cache. Row offsets are 64 bits wide.

Shapes: T tokens, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_blackmamba.ops.triton_support import interpreted, unavailable

__all__ = ["losses_of", "unavailable", "unsupported"]

BLOCK_V = 8192
WARPS = 32
"""One program takes most registers of a multiprocessor: 132 rows of 100 KB on an H200, whose L2 cache holds 50 MB."""
LOWEST = tl.constexpr(-1e38)


def unsupported(logits_TV: Tensor) -> str | None:
    if not logits_TV.is_cuda and not interpreted():
        return "the tensors are not on a CUDA device"
    return "computes in float32, the input is float64" if logits_TV.dtype == torch.float64 else None


def losses_of(
    logits_TV: Tensor, labels_T: Tensor, differentiate: bool, z_loss: float = 0.0, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the fp32 loss of each token, and the logarithm of its sum of exponentials.

    With `differentiate` overwrite the logits by the gradient of loss + z_loss * log_sum².
    """
    T, V = logits_TV.shape
    loss_T, log_sum_T = logits_TV.new_empty((2, T), dtype=torch.float32)
    if T:
        block = min(BLOCK_V, triton.next_power_of_2(V))
        with torch.cuda.device_of(logits_TV):
            loss_and_gradient[(T,)](
                *(logits_TV, labels_T, loss_T, log_sum_T),
                GRADIENT=differentiate,
                Z_LOSS=z_loss,
                CAP=softcap or 0.0,
                V=V,
                BLOCK=block,
                num_warps=WARPS,
            )
    return loss_T, log_sum_T


@triton.jit
def loss_and_gradient(
    logits_TV, labels_T, loss_T, log_sum_T,
    GRADIENT: tl.constexpr, Z_LOSS: tl.constexpr, CAP: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the loss of a row; each block element keeps its own maximum and sum, so threads synchronise once."""
    t = tl.program_id(0).to(tl.int64)
    largest = tl.full((BLOCK,), LOWEST, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, V, BLOCK):
        v = first + tl.arange(0, BLOCK)
        x = tl.load(logits_TV + t * V + v, mask=v < V, other=LOWEST).to(tl.float32)
        x = tl.where(v < V, capped(x, CAP), LOWEST)
        grown = tl.maximum(largest, x)
        sums = sums * tl.exp(largest - grown) + tl.where(v < V, tl.exp(x - grown), 0.0)
        largest = grown
    top = tl.max(largest, 0)
    log_sum = top + tl.log(tl.sum(sums * tl.exp(largest - top), 0))
    label = tl.load(labels_T + t)
    tl.device_assert((label >= 0) & (label < V), "a label outside the vocabulary")
    tl.store(loss_T + t, log_sum - capped(tl.load(logits_TV + t * V + label).to(tl.float32), CAP))
    tl.store(log_sum_T + t, log_sum)
    if GRADIENT:
        tl.debug_barrier()  # the label's logit is read before another thread overwrites it
        for first in range(0, V, BLOCK):
            v = first + tl.arange(0, BLOCK)
            x = capped(tl.load(logits_TV + t * V + v, mask=v < V, other=0.0).to(tl.float32), CAP)
            share = tl.exp(x - log_sum)
            if Z_LOSS > 0.0:
                share *= 1.0 + 2.0 * Z_LOSS * log_sum
            gradient = share - tl.where(v == label, 1.0, 0.0)
            if CAP > 0.0:
                gradient *= 1.0 - (x / CAP) * (x / CAP)
            tl.store(logits_TV + t * V + v, gradient.to(logits_TV.dtype.element_ty), mask=v < V)


@triton.jit
def capped(x, CAP: tl.constexpr):
    """Return CAP * tanh(x / CAP), or without a cap x itself."""
    if CAP > 0.0:
        x = CAP * (2.0 * tl.sigmoid(2.0 * x / CAP) - 1.0)
    return x
