"""The modules of router kinds with a state, which follows what a batch says on all ranks.

Shapes: T tokens, E experts.
"""

from abc import abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.router import KindRouter, Measured, count
from megatron_blackmamba.routers import Tokens

from megatron.core.process_groups_config import ProcessGroupCollection

MEMORY = 0.9
"""Part of the bias that a step keeps: what one batch says is noisy."""


class StateRouter(KindRouter):
    """A router that gathers sums over a batch, by default each expert's tokens, and then moves its state by them."""

    def __init__(self, config: MegatronConfig, pg_collection: ProcessGroupCollection, is_mtp_layer: bool = False):
        super().__init__(config, pg_collection, is_mtp_layer)
        self.register_buffer("gathered", self.nothing(), persistent=False)

    def nothing(self) -> Tensor:
        """Return the sums before the first token."""
        return self.zero_counts(self.choices)

    def gather(self, logits_TE: Tensor, chosen: Tensor) -> None:
        """Add the tokens of a micro-batch on this rank to the sums."""
        count(chosen, self.gathered)

    @abstractmethod
    def move(self) -> None:
        """Change the state by the sums over all ranks."""

    @property
    def gathers(self) -> bool:
        """Return whether this forward pass counts: once for each micro-batch in training."""
        return self.training and self.counter_E is not None

    def routing(self, logits_TE: Tensor, at: Tokens) -> Tensor:
        chosen = super().routing(logits_TE, at)
        if self.gathers:
            self.gather(logits_TE, chosen)
        return chosen

    def begin_batch(self) -> None:
        self.gathered.zero_()

    @torch.no_grad()
    def end_batch(self) -> None:
        if (group := self.groups["data"]) is not None:
            dist.all_reduce(self.gathered, group=group)
        self.move()
        self.gathered.zero_()


class BiasRouter(StateRouter):
    """A router with a bias of each expert."""

    def approach(self, bias_E: Tensor) -> None:
        """Move the bias some of the way to another one."""
        self.expert_bias.mul_(MEMORY).add_(bias_E.to(self.expert_bias), alpha=1 - MEMORY)

    def measured(self) -> Measured:
        return super().measured() | {"bias_range": (self.expert_bias.max() - self.expert_bias.min(), 1.0)}
