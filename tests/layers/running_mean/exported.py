"""The running mean for training, decoding and exports; each export contains a copy of this file."""

import torch
import torch.nn.functional as F
from torch import nn

from megatron_blackmamba.hf.functions_blackmamba import widen
from megatron_blackmamba.hf.recurrent_blackmamba import Recurrent, linear, use_kernels


def mean(x_BLD, keep_BL1, reset_BL, total_BD, count_B1):
    """Return the mean of each document's tokens so far, and the state: their sum and their number."""
    x_BLD = widen(x_BLD)
    counted_BL1 = torch.ones_like(x_BLD[..., :1]) if keep_BL1 is None else keep_BL1.to(x_BLD.dtype)
    total_BLD, count_BL1 = sums(x_BLD, reset_BL, total_BD), sums(counted_BL1, reset_BL, count_B1)
    return total_BLD / count_BL1.clamp(min=1), total_BLD[:, -1], count_BL1[:, -1]


def sums(x_BLD, reset_BL, start_BD):
    """Return the sum of each document's tokens so far; a document begins where reset_BL is true."""
    if start_BD is not None:  # as a token before the first
        reset_BL = None if reset_BL is None else F.pad(reset_BL, (1, 0))
        return sums(torch.cat((start_BD[:, None], x_BLD), 1), reset_BL, None)[:, 1:]
    sums_BLD = x_BLD.cumsum(1)
    if reset_BL is None:
        return sums_BLD
    place_L = torch.arange(x_BLD.shape[1], device=x_BLD.device)
    first_BL1 = torch.where(reset_BL, place_L, 0).cummax(1).values[..., None]
    return sums_BLD - (sums_BLD - x_BLD).gather(1, first_BL1.expand_as(x_BLD))


class MeanMixer(Recurrent):
    """The state is the sum of all tokens so far with their number behind it, `[B, D + 1]`."""

    def __init__(self, config, layer):
        super().__init__()
        D, self.layer = config.hidden_size, layer
        self.in_proj, self.out_proj = (linear(D, D, use_kernels(config)) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(D))

    def initialise(self):
        self.gain.fill_(1.0)

    def forward(self, u_BLD, keep_BL1, reset_BL, cache):
        x_BLD = self.in_proj(u_BLD) if keep_BL1 is None else self.in_proj(u_BLD) * keep_BL1
        before_BE = self.recalled(cache, widen(F.pad(x_BLD[:, 0], (0, 1))))
        y_BLD, *after = mean(x_BLD, keep_BL1, reset_BL, before_BE[:, :-1], before_BE[:, -1:])
        self.remember(cache, torch.cat(after, dim=-1))
        return self.out_proj((y_BLD * self.gain).to(u_BLD.dtype))
