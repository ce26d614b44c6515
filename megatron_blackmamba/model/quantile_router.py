"""The module of the router kind `quantile`: it gathers what tokens need during a batch, and then moves the bias.

Shapes: T tokens, E experts, H bins.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.router import KindRouter, Measured
from megatron_blackmamba.routers import Tokens
from megatron_blackmamba.routers.quantile import BINS, MEMORY, balancing_bias, histogram_of_needs
from megatron_blackmamba.runtime import device

from megatron.core.process_groups_config import ProcessGroupCollection


class QuantileRouter(KindRouter):
    """A router with a bias for each expert, which follows the quantiles of a batch over all ranks."""

    def __init__(self, config: MegatronConfig, pg_collection: ProcessGroupCollection, is_mtp_layer: bool = False):
        super().__init__(config, pg_collection, is_mtp_layer)
        experts = config.num_moe_experts
        self.register_buffer("expert_bias", torch.zeros(experts, dtype=torch.float32, device=device.device()))
        self.register_buffer("needs_EH", self._counts(experts, BINS), persistent=False)

    def routing(self, logits_TE: Tensor, at: Tokens) -> Tensor:
        if self.training and self.counter_E is not None:
            self.needs_EH += histogram_of_needs(self.use.scored(logits_TE), self.expert_bias, at.model.top_k)
        return super().routing(logits_TE, replace(at, bias_E=self.expert_bias))

    def begin_batch(self) -> None:
        self.needs_EH.zero_()

    @torch.no_grad()
    def end_batch(self) -> None:
        if (group := self.groups["data"]) is not None:
            dist.all_reduce(self.needs_EH, group=group)
        balanced_E = balancing_bias(self.needs_EH, self.expert_bias, self.described.top_k)
        self.expert_bias.mul_(MEMORY).add_(balanced_E.to(self.expert_bias), alpha=1 - MEMORY)
        self.needs_EH.zero_()

    def measured(self) -> Measured:
        return super().measured() | {"bias_range": (self.expert_bias.max() - self.expert_bias.min(), 1.0)}
