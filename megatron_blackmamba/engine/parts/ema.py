"""An exponential moving average of the weights, kept by each rank for the weights that its optimizer updates.

The distributed optimizer owns a contiguous range of the elements of some weights; the average is of these ranges, so
nothing is gathered to update or to save it. A plain optimizer owns whole weights on every data-parallel rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from megatron_blackmamba.engine.checked import private
from megatron_blackmamba.engine.parts.optimizer import Built
from megatron_blackmamba.engine.parts.optimizer_shards import Boxes, boxes_of, entries_of

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

STATE = "ema"
"""The name of the average in a checkpoint, beside the optimizer's other states of a weight."""


@dataclass(frozen=True)
class Shard:
    """The elements of one weight that this rank's optimizer updates, and their average."""

    weight: nn.Parameter
    """The model's, which may be in 16 bits."""
    start: int
    end: int
    updated: Tensor
    """The optimizer's own copy of these elements in full precision, or the elements themselves."""
    mean: Tensor
    replicated: bool
    """Whether the other data-parallel ranks have the same."""

    @property
    def in_model(self) -> Tensor:
        """Return these elements as the model computes with them."""
        return self.weight.data.view(-1)[self.start : self.end]


class Ema:
    """The average of all weights that this rank updates: mean = decay * mean + (1 - decay) * weight, after each step.

    It is in the precision of the optimizer's copy of a weight: fp32, or float64 in a float64 run.
    """

    def __init__(self, built: Built, decay: float) -> None:
        """Begin with the weights as they are."""
        self.decay, self._reduced = decay, built.reduced
        self.shards = [shard for part in built.parts for shard in _shards_of(part)]
        self._means = [shard.mean for shard in self.shards]
        self._updated = [shard.updated for shard in self.shards]

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again with the weights as they are now."""
        for shard in self.shards:
            shard.mean.copy_(shard.updated)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of a step that was applied."""
        if self._means:
            torch._foreach_lerp_(self._means, self._updated, 1 - self.decay)

    def sharded(self, weights: dict, is_loading: bool) -> dict[int, Boxes]:
        """Return this rank's part of the average for a checkpoint, in boxes that any layout can load.

        weights: the model's sharded weights, which say where each weight lies in the unsharded one.
        """
        entries, found = entries_of(weights), {}
        for number, shard in enumerate(self.shards):
            place = entries[shard.weight], STATE, shard.start, shard.end
            found[number] = dict(enumerate(boxes_of(*place, shard.mean, is_loading, shard.replicated)))
        return found

    @torch.no_grad()
    def load(self, state: dict[int, dict[int, Tensor]]) -> None:
        """Copy loaded boxes into the average, in the order of `sharded`."""
        for number, shard in enumerate(self.shards):
            parts = state[number]
            shard.mean.copy_(torch.cat([parts[place].flatten() for place in sorted(parts)]).view_as(shard.mean))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the model compute with the average, in its own precision. Afterwards every bit is as before.

        Every rank calls this, with all weights gathered.
        """
        kept = [shard.in_model.clone() for shard in self.shards]
        try:
            self._give([shard.mean for shard in self.shards])
            yield
        finally:
            self._give(kept)

    @torch.no_grad()
    def _give(self, values: list[Tensor]) -> None:
        for shard, value in zip(self.shards, values, strict=True):
            shard.in_model.copy_(value.view(-1))
        if self._reduced.ddp_config.use_distributed_optimizer:
            self._reduced.start_param_sync(force_sync=True)


def _shards_of(part: Any) -> Iterator[Shard]:
    """Yield the weights, or their ranges, that one optimizer updates."""
    if getattr(part, "is_stub_optimizer", False):  # this rank has no weight of that kind
        return
    if not isinstance(part, DistributedOptimizer):
        for weight in chain(*(group["params"] for group in part.param_groups)):
            yield Shard(weight, 0, weight.numel(), weight.detach(), weight.detach().clone(), replicated=True)
        return
    range_of = private(part, "_get_model_param_range_map")
    narrow = (part.model_float16_groups, part.shard_fp32_from_float16_groups)
    wide = (part.model_fp32_groups, part.shard_fp32_groups)
    for weights, shards in (narrow, wide):
        for weight, shard in zip(chain(*weights), chain(*shards), strict=True):
            here = range_of(weight)["param"]
            yield Shard(weight, here.start, here.end, shard.detach(), shard.detach().clone(), replicated=False)
