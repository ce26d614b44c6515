"""The same norm for training."""

import torch
import torch.nn.functional as F

from megatron_blackmamba.model.sharding import empty, replicated, without_decay
from tests.model.shifted_norm import ShiftedNorm


class Module(torch.nn.Module):
    def __init__(self, config, hidden_size, eps):
        super().__init__()
        self.eps, self.dtype = eps, config.params_dtype
        for name in ShiftedNorm.parameters:
            parameter = replicated(empty(hidden_size, dtype=self.dtype), config.sequence_parallel)
            setattr(self, name, without_decay(parameter))

    def forward(self, x):
        weight, shift = self.weight.to(x.dtype), self.shift.to(x.dtype)
        return (F.rms_norm(x, weight.shape, weight, self.eps) + shift).to(self.dtype)
