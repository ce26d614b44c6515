"""The cross entropy of each token in Triton, and in place of the logits its gradient but for the loss's own.

A program takes one token. It reads the logits twice, first for their maximum and sum. So few programs are at work at
once that the second read comes from the L2 cache. A thread loads 16 bytes at a time and keeps one maximum and one sum,
so that a logit takes little more than two exponentials. Row offsets are 64 bits wide.

Shapes: T tokens, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_blackmamba.ops.backends import UP_TO_FP32, Takes
from megatron_blackmamba.ops.triton_math import LOG2E

TAKES = Takes("cuda", UP_TO_FP32)
BLOCK_V, LOADS, WARPS = 4096, 4, 16
"""Logits that a program loads at once, and how often before it computes. 56 registers a thread leave two programs to a
multiprocessor: one loads while the other computes. 264 rows of 100 KB on an H200 fit into its L2 cache of 50 MB."""
LOAD_BYTES = 16
LOWEST = tl.constexpr(-1e38)


def losses_of(
    logits_TV: Tensor, labels_T: Tensor, differentiate: bool, z_loss: float = 0.0, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the fp32 loss of each token, and the logarithm of its sum of exponentials.

    With `differentiate` overwrite the logits by the gradient of loss + z_loss * log_sum².
    """
    T, V = logits_TV.shape
    loss_T, log_sum_T = logits_TV.new_empty((2, T), dtype=torch.float32)
    if T:
        wide = LOAD_BYTES // logits_TV.element_size()
        with torch.cuda.device_of(logits_TV):
            loss_and_gradient[(T,)](
                *(logits_TV, labels_T, loss_T, log_sum_T),
                GRADIENT=differentiate,
                Z_LOSS=z_loss,
                CAP=softcap or 0.0,
                V=V,
                LANES=max(1, min(BLOCK_V, triton.next_power_of_2(V)) // wide),
                WIDE=wide,
                LOADS=LOADS,
                num_warps=WARPS,
            )
    return loss_T, log_sum_T


@triton.jit
def loss_and_gradient(
    logits_TV, labels_T, loss_T, log_sum_T,
    GRADIENT: tl.constexpr, Z_LOSS: tl.constexpr, CAP: tl.constexpr, V: tl.constexpr,
    LANES: tl.constexpr, WIDE: tl.constexpr, LOADS: tl.constexpr,
):  # fmt: skip
    """Compute the loss of a row; each of LANES keeps its own maximum and sum, so threads synchronise once."""
    BLOCK: tl.constexpr = LANES * WIDE
    WHOLE: tl.constexpr = V // (LOADS * BLOCK) * LOADS * BLOCK
    row = logits_TV + tl.program_id(0).to(tl.int64) * V
    at = tl.arange(0, LANES)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    largest = tl.full((LANES,), LOWEST / 2, tl.float32)  # above the padding, which thereby adds nothing
    sums = tl.zeros((LANES,), tl.float32)
    for first in range(0, WHOLE, LOADS * BLOCK):
        largest, sums = _with_more(largest, sums, row, first + at, V, CAP, False, BLOCK, LOADS)
    for first in range(WHOLE, V, BLOCK):
        largest, sums = _with_more(largest, sums, row, first + at, V, CAP, True, BLOCK, 1)
    top = tl.max(largest, 0)
    log_sum = top + tl.log(tl.sum(sums * tl.exp2((largest - top) * LOG2E), 0))
    label = tl.load(labels_T + tl.program_id(0))
    tl.device_assert((label >= 0) & (label < V), "a label outside the vocabulary")
    x = capped(tl.load(row + label).to(tl.float32), CAP)
    tl.store(loss_T + tl.program_id(0), log_sum - x)
    tl.store(log_sum_T + tl.program_id(0), log_sum)
    if GRADIENT:
        tl.debug_barrier()  # the label's logit is read before another thread overwrites it
        for first in range(0, WHOLE, LOADS * BLOCK):
            _overwrite(row, first + at, V, log_sum, Z_LOSS, CAP, False, BLOCK, LOADS)
        for first in range(WHOLE, V, BLOCK):
            _overwrite(row, first + at, V, log_sum, Z_LOSS, CAP, True, BLOCK, 1)
        tl.debug_barrier()  # the label's gradient is written again
        tl.store(row + label, _gradient(x, log_sum, 1.0, Z_LOSS, CAP).to(row.dtype.element_ty))


@triton.jit
def _load(row, v, V: tl.constexpr, CAP: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr, LOADS: tl.constexpr):
    """Load blocks of logits together, one tuple entry each; outside the vocabulary they are LOWEST."""
    loaded, logits = (), ()
    for k in tl.static_range(LOADS):
        loaded = loaded + (
            tl.load(row + v + k * BLOCK, mask=v < V, other=LOWEST) if RAGGED else tl.load(row + v + k * BLOCK),
        )
    for k in tl.static_range(LOADS):
        x = capped(loaded[k].to(tl.float32), CAP)
        logits = logits + (tl.where(v < V, x, LOWEST) if RAGGED else x,)
    return logits


@triton.jit
def _with_more(
    largest, sums, row, v, V: tl.constexpr,
    CAP: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr, LOADS: tl.constexpr,
):  # fmt: skip
    """Return each lane's maximum, and its sum of exponentials relative to that, with some more logits."""
    logits = _load(row, v, V, CAP, RAGGED, BLOCK, LOADS)
    grown = largest
    for k in tl.static_range(LOADS):
        grown = tl.maximum(grown, tl.max(logits[k], 1))
    sums *= tl.exp2((largest - grown) * LOG2E)
    for k in tl.static_range(LOADS):
        sums += tl.sum(tl.exp2(logits[k] * LOG2E - (grown * LOG2E)[:, None]), 1)
    return grown, sums


@triton.jit
def _overwrite(
    row, v, V: tl.constexpr, log_sum,
    Z_LOSS: tl.constexpr, CAP: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr, LOADS: tl.constexpr,
):  # fmt: skip
    logits = _load(row, v, V, CAP, RAGGED, BLOCK, LOADS)
    for k in tl.static_range(LOADS):
        gradient = _gradient(logits[k], log_sum, 0.0, Z_LOSS, CAP).to(row.dtype.element_ty)
        if RAGGED:
            tl.store(row + v + k * BLOCK, gradient, mask=v < V)
        else:
            tl.store(row + v + k * BLOCK, gradient)


@triton.jit
def _gradient(x, log_sum, is_label, Z_LOSS: tl.constexpr, CAP: tl.constexpr):
    """Return the gradient of loss + Z_LOSS * log_sum² by the logit before its cap, x."""
    share = tl.exp2(x * LOG2E - log_sum * LOG2E)
    if Z_LOSS > 0.0:
        share *= 1.0 + 2.0 * Z_LOSS * log_sum
    gradient = share - is_label
    if CAP > 0.0:
        gradient *= 1.0 - (x / CAP) * (x / CAP)
    return gradient


@triton.jit
def capped(x, CAP: tl.constexpr):
    """Return CAP * tanh(x / CAP), or without a cap x itself."""
    if CAP > 0.0:
        x = CAP * (2.0 * tl.sigmoid(2.0 * x / CAP) - 1.0)
    return x
