"""The running mean as a recurrence."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.layers import Decoding

from .arithmetic import sums


@dataclass(frozen=True)
class MeanLayer:
    in_proj: Tensor
    gain: Tensor
    out_proj: Tensor


class MeanDecoding(Decoding):
    """The memory is the sum of all tokens so far, and their number."""

    def pack(self, get, model, dtype, device):
        return MeanLayer(get("in_proj.weight", dtype), get("gain", dtype), get("out_proj.weight", dtype))

    def memory(self, model, batch, dtype, device):
        return [torch.zeros(batch, model.hidden_size, device=device), torch.zeros(batch, 1, device=device)]

    def step(self, run, layer, memory, x_BD, inputs):
        total_BD, count_B1 = memory
        total_BD += run.times(x_BD, layer.in_proj)
        count_B1 += 1
        return run.times(total_BD / count_B1 * layer.gain, layer.out_proj)

    def read(self, run, layer, memory, x_BLD, inputs):
        keep_BL1, reset_BL = inputs.keep_BL1, inputs.reset_BL
        total_BD, count_B1 = memory
        x_BLD = F.linear(x_BLD, layer.in_proj).float()
        keep_BL1 = torch.ones_like(x_BLD[..., :1]) if keep_BL1 is None else keep_BL1.float()
        if reset_BL is not None:
            reset_BL = F.pad(reset_BL, (1, 0))  # the memory is in front of the tokens
        totals_BLD = sums(torch.cat((total_BD[:, None], x_BLD * keep_BL1), 1), reset_BL)[:, 1:]
        counts_BL1 = sums(torch.cat((count_B1[:, None], keep_BL1), 1), reset_BL)[:, 1:]
        total_BD.copy_(totals_BLD[:, -1])
        count_B1.copy_(counts_BL1[:, -1])
        y_BLD = totals_BLD / counts_BL1.clamp(min=1) * layer.gain
        return F.linear(y_BLD.to(layer.out_proj.dtype), layer.out_proj)
