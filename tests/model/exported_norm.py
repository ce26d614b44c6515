"""The shifted norm in an export, which contains a copy of this file."""

import torch
from torch import nn

from megatron_blackmamba.hf.functions_blackmamba import normalized, widen


class ShiftedNorm(nn.Module):
    def __init__(self, size, eps, factor):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.eps, self.factor = eps, factor

    def forward(self, x):
        y = self.factor * normalized(x, self.eps) * widen(self.gain) + widen(self.shift)
        return y.to(self.gain.dtype)
