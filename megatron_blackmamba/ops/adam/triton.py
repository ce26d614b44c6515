"""Adam over many fp32 tensors in one launch, in Triton: it clips, updates, and writes the weights in bf16 too.

A table in GPU memory holds the addresses of each chunk of a tensor, and a program takes one chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_blackmamba.ops.adam import rounding
from megatron_blackmamba.ops.backends import Takes

TAKES = Takes("cuda", (torch.float32,))
CHUNK = 16384
BLOCK = 1024
ALIGNMENT = 16
"""Bytes of the widest loads and stores."""
WEIGHT_FACTOR, FACTOR_1, FACTOR_2 = (
    tl.constexpr(factor) for factor in (rounding.WEIGHT_FACTOR, rounding.FACTOR_1, rounding.FACTOR_2)
)


@dataclass(frozen=True)
class Settings:
    """The numbers of one update."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    step: int


class Table:
    """The addresses of tensors that are updated together."""

    def __init__(self, *columns: Sequence[Tensor | None]):
        """Columns: gradients (fp32 or bf16), weights (fp32), both moments (fp32 or bf16), copies in bf16 or None."""
        self.key = key_of(*columns)
        rows = []
        for tensors in zip(*columns, strict=True):
            _check(*tensors)
            numel = tensors[0].numel()
            for first in range(0, numel, CHUNK):
                starts = [0 if x is None else x.data_ptr() + first * x.element_size() for x in tensors]
                rows.append([*starts, min(CHUNK, numel - first)])
        self.aligned = all(start % ALIGNMENT == 0 for row in rows for start in row[:-1])
        self.narrow_gradients, self.narrow = (
            any(x.dtype == torch.bfloat16 for x in column if x is not None) for column in (columns[0], columns[2])
        )
        self.rows = torch.tensor(rows, dtype=torch.int64).to(columns[1][0].device)

    def update(self, by: Settings, factor: Tensor | float) -> None:
        """Multiply the gradients by `factor` while reading them, and update the weights and their copies.

        factor: Also an fp32 tensor of one number, for which the host need not wait. If that is NaN, nothing changes.
        """
        if not len(self.rows):
            return
        if not isinstance(factor, Tensor):
            factor = torch.full((), factor, dtype=torch.float32, device=self.rows.device)
        corrected1, corrected2 = 1 - by.beta1**by.step, 1 - by.beta2**by.step
        with torch.cuda.device_of(self.rows):
            adam_update[(len(self.rows),)](
                self.rows, factor, 1 - by.beta1, by.beta2, 1 - by.beta2, by.eps,
                by.lr / corrected1, corrected2**-0.5,
                1 - by.lr * by.weight_decay if by.decoupled else by.weight_decay, rounding.seed_of(by.step),
                DECOUPLED=by.decoupled, NARROW=self.narrow, NARROW_GRADIENTS=self.narrow_gradients,
                ALIGNED=self.aligned, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip


def _check(*tensors: Tensor | None) -> None:
    dtypes = [None if x is None else x.dtype for x in tensors]
    narrow, both = torch.bfloat16, (torch.float32, torch.bfloat16)
    gradient, weight, first, second, copy = dtypes
    if not (gradient in both and weight is torch.float32 and first == second in both and copy in (None, narrow)):
        raise ValueError(
            "Adam's kernel takes float32 weights, gradients and moments in float32 or bfloat16, and bfloat16 copies,"
            f" not {dtypes}"
        )
    if not all(x is None or (x.is_contiguous() and x.numel() == tensors[0].numel()) for x in tensors):
        raise ValueError("Adam's kernel takes contiguous tensors of one size. Pass such tensors.")


def key_of(*columns: Sequence[Tensor | None]) -> tuple[int, ...]:
    """Return what two calls share if they update the same memory."""
    return tuple(0 if x is None else x.data_ptr() for column in columns for x in column)


@triton.jit(
    do_not_specialize=["rest1", "beta2", "rest2", "eps", "rate", "correction", "decay", "seed"]
)  # else a value of 1 would compile anew
def adam_update(
    rows, place_of_factor, rest1, beta2, rest2, eps, rate, correction, decay, seed,
    DECOUPLED: tl.constexpr, NARROW: tl.constexpr, NARROW_GRADIENTS: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    factor = tl.load(place_of_factor)
    row = rows + tl.program_id(0).to(tl.int64) * 6
    gradient = tl.load(row).to(tl.pointer_type(tl.bfloat16 if NARROW_GRADIENTS else tl.float32))
    weight = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    stored: tl.constexpr = tl.bfloat16 if NARROW else tl.float32
    first_moment = tl.load(row + 2).to(tl.pointer_type(stored))
    second_moment = tl.load(row + 3).to(tl.pointer_type(stored))
    address = tl.load(row + 4)
    copy = address.to(tl.pointer_type(tl.bfloat16))
    if ALIGNED:
        gradient, weight = tl.multiple_of(gradient, 16), tl.multiple_of(weight, 16)
        first_moment, second_moment = tl.multiple_of(first_moment, 16), tl.multiple_of(second_moment, 16)
        copy = tl.multiple_of(copy, 16)
    count = tl.where(factor == factor, tl.load(row + 5).to(tl.int32), 0)
    whole = count // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):  # without a mask, so that loads are wide
        _update_block(
            gradient, weight, first_moment, second_moment, copy, address != 0, start, count,
            factor, rest1, beta2, rest2, eps, rate, correction, decay, seed, DECOUPLED, NARROW, False, BLOCK,
        )  # fmt: skip
    if whole < count:
        _update_block(
            gradient, weight, first_moment, second_moment, copy, address != 0, whole, count,
            factor, rest1, beta2, rest2, eps, rate, correction, decay, seed, DECOUPLED, NARROW, True, BLOCK,
        )  # fmt: skip


@triton.jit
def _update_block(
    gradient, weight, first_moment, second_moment, copy, copied, start, count,
    factor, rest1, beta2, rest2, eps, rate, correction, decay, seed,
    DECOUPLED: tl.constexpr, NARROW: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = start + tl.arange(0, BLOCK)
    mask = i < count if MASKED else None
    g = tl.load(gradient + i, mask=mask).to(tl.float32) * factor
    w = tl.load(weight + i, mask=mask)
    m, v = tl.load(first_moment + i, mask=mask), tl.load(second_moment + i, mask=mask)
    if NARROW:
        bits = _random_bits(m, v, w, seed)
        m, v = m.to(tl.float32), v.to(tl.float32)
    if DECOUPLED:
        w *= decay
    else:
        g += decay * w
    m += (g - m) * rest1
    v = v * beta2 + g * g * rest2
    w -= rate * m / (tl.sqrt_rn(v) * correction + eps)
    if NARROW:
        tl.store(first_moment + i, _rounded(m, bits & 0xFFFF), mask=mask)
        tl.store(second_moment + i, _rounded(v, bits >> 16), mask=mask)
    else:
        tl.store(first_moment + i, m, mask=mask)
        tl.store(second_moment + i, v, mask=mask)
    tl.store(weight + i, w, mask=mask)
    if copied:
        tl.store(copy + i, w.to(tl.bfloat16), mask=mask)


@triton.jit
def _random_bits(m, v, w, seed):
    """Compute rounding.random_bits."""
    high, low = m.to(tl.uint16, bitcast=True).to(tl.uint32), v.to(tl.uint16, bitcast=True).to(tl.uint32)
    upper = w.to(tl.uint32, bitcast=True) >> 16
    x = (high << 16 | low) ^ upper * WEIGHT_FACTOR ^ seed.to(tl.uint32)
    x = (x ^ x >> 16) * FACTOR_1
    x = (x ^ x >> 13) * FACTOR_2
    return x ^ x >> 16


@triton.jit
def _rounded(x, bits):
    """Compute rounding.to_bf16."""
    raw = x.to(tl.uint32, bitcast=True)
    raw = tl.where(x == x, raw + bits, raw)
    return (raw >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
