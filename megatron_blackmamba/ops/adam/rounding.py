"""Stochastic rounding to bf16: up or down at random, so that the mean is exact.

Rounding to nearest loses every change below half a unit of the last place. A second moment with beta2 = 0.999 changes
by less than that in most steps, and would never decay. The random bits are a hash of the step and of what an update
reads: the weight's upper half and both moments. So they need no state, a resumed run draws the same bits, and so does
every layout, whichever rank holds the weight.
"""

import torch
from torch import Tensor

WEIGHT_FACTOR, FACTOR_1, FACTOR_2 = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
"""Odd 32-bit factors: of a Weyl sequence, and of MurmurHash3's last step."""


def seed_of(step: int) -> int:
    """Return a number of 32 bits for a step, as a signed integer."""
    x = step * WEIGHT_FACTOR & 0xFFFFFFFF
    x = (x ^ x >> 16) * FACTOR_1 & 0xFFFFFFFF
    x = (x ^ x >> 13) * FACTOR_2 & 0xFFFFFFFF
    return _signed(x ^ x >> 16)


def random_bits(first: Tensor, second: Tensor, weight: Tensor, seed: int) -> Tensor:
    """Return 32 random bits for each weight, from both its bf16 moments before the update and the step's seed."""
    upper = _shifted(weight.float().view(torch.int32), 16)
    x = (first.view(torch.int16).int() << 16) | (second.view(torch.int16).int() & 0xFFFF)
    x = x ^ upper * _signed(WEIGHT_FACTOR) ^ seed
    x = (x ^ _shifted(x, 16)) * _signed(FACTOR_1)
    x = (x ^ _shifted(x, 13)) * _signed(FACTOR_2)
    return x ^ _shifted(x, 16)


def to_bf16(wide: Tensor, bits: Tensor) -> Tensor:
    """Round to bf16 with the lower 16 of the random bits."""
    raw = wide.float().view(torch.int32)
    raw = torch.where(wide.isnan(), raw, raw + (bits & 0xFFFF))
    return (raw & -0x10000).view(torch.float32).bfloat16()


def _shifted(x: Tensor, places: int) -> Tensor:
    """Shift right without the sign."""
    return x >> places & (1 << 32 - places) - 1


def _signed(x: int) -> int:
    return x - 2**32 if x >= 2**31 else x
