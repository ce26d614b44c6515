"""Tensors whose tokens lie so far apart that offsets in numbers pass 2^31, in memory that is reserved but not used."""

import mmap

import torch
from torch import Tensor

STRIDE = 2**27 + 512
"""Numbers from token to token: token 16 lies beyond 2^31."""
TOKENS, CHANNELS, TENSORS = 24, 32, 16
MAP_NORESERVE = 0x4000  # of Linux; Python names it from 3.13 on


class Far:
    """A sparse block of 13 GB for a few tensors `[1, TOKENS, CHANNELS]`; only their pages take memory."""

    def __init__(self) -> None:
        size = 4 * (TOKENS * STRIDE)
        self.block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        self.block.madvise(mmap.MADV_NOHUGEPAGE)
        self.numbers = torch.frombuffer(self.block, dtype=torch.float32)
        self.used = 0

    def like(self, x_BLI: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised tensor of x's shape; takes the place of `empty_like_rows`."""
        assert x_BLI.shape == (1, TOKENS, CHANNELS) and dtype in (None, torch.float32) and self.used < TENSORS
        self.used += 1
        return self.numbers.as_strided(x_BLI.shape, (TOKENS * STRIDE, STRIDE, 1), CHANNELS * (self.used - 1))

    def of(self, x_BLI: Tensor) -> Tensor:
        """Return a copy of x."""
        return self.like(x_BLI).copy_(x_BLI)
