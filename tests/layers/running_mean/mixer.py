"""The running mean as a torch module."""

import torch

from megatron_blackmamba.model.linears import column, row
from megatron_blackmamba.model.sharding import empty, without_decay

from megatron.core.transformer.module import MegatronModule


class MeanMixer(MegatronModule):
    def __init__(self, config, layer_number, pg_collection):
        super().__init__(config)
        D, tp_group = config.hidden_size, pg_collection.tp
        self.gain = without_decay(empty(D // tp_group.size(), dtype=config.params_dtype))  # of this rank's channels
        self.in_proj = column(D, D, config, tp_group)
        self.out_proj = row(D, D, config, tp_group)

    def forward(self, hidden_SBD, inputs):
        x_SBI, _ = self.in_proj(hidden_SBD)
        mean_BSI = mean(x_SBI.transpose(0, 1).to(self.config.full_precision), inputs.reset_BS)
        y_SBI = mean_BSI.transpose(0, 1).to(x_SBI.dtype) * self.gain
        return self.out_proj(y_SBI.contiguous())[0]


def mean(x_BLD, reset_BL):
    """Return the mean of each document's tokens so far."""
    return sums(x_BLD, reset_BL) / sums(torch.ones_like(x_BLD[..., :1]), reset_BL)


def sums(x_BLD, reset_BL):
    """Return the sum of each document's tokens so far; a document begins where reset_BL is true."""
    sums_BLD = x_BLD.cumsum(1)
    if reset_BL is None:
        return sums_BLD
    place_L = torch.arange(x_BLD.shape[1], device=x_BLD.device)
    first_BL1 = torch.where(reset_BL, place_L, 0).cummax(1).values[..., None]
    return sums_BLD - (sums_BLD - x_BLD).gather(1, first_BL1.expand_as(x_BLD))
