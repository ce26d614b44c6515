"""A matrix product for each expert, one after another."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops.matvec import product


def grouped_linear(x_TD: Tensor, tokens_per_expert_E: Tensor, weight_EOD: Tensor, ends_E: Tensor | None) -> Tensor:
    parts = x_TD.split(tokens_per_expert_E.tolist())
    times = F.linear if torch.is_grad_enabled() or x_TD.is_cuda else product
    return torch.cat([times(part, weight) for part, weight in zip(parts, weight_EOD.unbind(), strict=True)])
