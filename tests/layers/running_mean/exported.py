"""The running mean in an export, which contains a copy of this file."""

import torch
from torch import nn

from megatron_blackmamba.hf.functions_blackmamba import document_sums, widen
from megatron_blackmamba.hf.recurrent_blackmamba import Recurrent, linear, use_kernels


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
        x_BLD = widen(self.in_proj(u_BLD))
        counted_BLE = torch.cat((x_BLD, torch.ones_like(x_BLD[..., :1])), dim=-1)
        if keep_BL1 is not None:
            counted_BLE = counted_BLE * keep_BL1
        sums_BLE = document_sums(counted_BLE, self.recalled(cache, counted_BLE[:, 0]), reset_BL)
        self.remember(cache, sums_BLE[:, -1])
        mean_BLD = sums_BLE[..., :-1] / sums_BLE[..., -1:].clamp(min=1)
        return self.out_proj((mean_BLD * self.gain).to(u_BLD.dtype))
