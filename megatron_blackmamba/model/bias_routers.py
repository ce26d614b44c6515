"""The module of router kinds with a bias for each expert, which follows what a batch says on all ranks.

Shapes: T tokens, E experts.
"""

from abc import abstractmethod
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.router import KindRouter, Measured
from megatron_blackmamba.routers import Tokens
from megatron_blackmamba.runtime import device

from megatron.core.process_groups_config import ProcessGroupCollection

MEMORY = 0.9
"""Part of the bias that a step keeps: what one batch says is noisy."""


class BiasRouter(KindRouter):
    """A router that gathers sums over a batch, and then moves its bias by them."""

    def __init__(self, config: MegatronConfig, pg_collection: ProcessGroupCollection, is_mtp_layer: bool = False):
        super().__init__(config, pg_collection, is_mtp_layer)
        self.register_buffer("expert_bias", torch.zeros(self.choices, dtype=torch.float32, device=device.device()))
        self.register_buffer("gathered", self._nothing(), persistent=False)

    @abstractmethod
    def _nothing(self) -> Tensor:
        """Return the sums before the first token."""

    @abstractmethod
    def _move(self) -> None:
        """Change the bias by the sums over all ranks."""

    def _approach(self, bias_E: Tensor) -> None:
        """Move the bias some of the way to another one."""
        self.expert_bias.mul_(MEMORY).add_(bias_E.to(self.expert_bias), alpha=1 - MEMORY)

    def routing(self, logits_TE: Tensor, at: Tokens) -> Tensor:
        if self.training and self.counter_E is not None:
            at = self._gather(logits_TE, at)
        return super().routing(logits_TE, replace(at, bias_E=self.expert_bias))

    def _gather(self, logits_TE: Tensor, at: Tokens) -> Tokens:
        """Add to the sums; return what the kind reads, which may have a place to add to."""
        return at

    def begin_batch(self) -> None:
        self.gathered.zero_()

    @torch.no_grad()
    def end_batch(self) -> None:
        if (group := self.groups["data"]) is not None:
            dist.all_reduce(self.gathered, group=group)
        self._move()
        self.gathered.zero_()

    def measured(self) -> Measured:
        return super().measured() | {"bias_range": (self.expert_bias.max() - self.expert_bias.min(), 1.0)}
