"""One training step: gradients of a global batch, then an update. The trainer, the tests and the quickstart share it.

The two are apart so that whoever guards the run can look at the loss before a weight changes.

Shapes: B batch, S sequence, L layers, E experts.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_blackmamba import routers
from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.engine.parts.optimizer import NonFiniteGradient
from megatron_blackmamba.model import LanguageModel
from megatron_blackmamba.model.language_model import shifted
from megatron_blackmamba.model.stack import between_stages
from megatron_blackmamba.runtime import device
from megatron_blackmamba.runtime.world import World
from megatron_blackmamba.training.step.graphs import Batch, Found, Graphs
from megatron_blackmamba.training.step.optimizer import Trainable
from megatron_blackmamba.training.watch.finite import FirstSeen
from megatron_blackmamba.training.watch.reports import Reports
from megatron_blackmamba.training.watch.stragglers import OwnTime

from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.moe.router import Router

_MORE = ("squares", "next", "next_tokens")
"""Sums that only some models have: squared log-sums of logits; losses of the extra depth, and their tokens."""


@dataclass(frozen=True)
class Losses:
    """The losses of a global batch, equal on every rank."""

    loss: float
    tokens: int
    source_loss: list[float]
    """Mean loss of each source; NaN where the batch has none of it."""
    source_tokens: list[int]
    expert_tokens: list[list[int]]
    """`[L][E]`: tokens each expert of each layer got."""
    computing: list[float]
    """By rank: seconds of the backward pass of a layer that waits for no other rank."""
    reading: list[float]
    """By rank: seconds spent waiting for micro-batches."""
    reports: Reports
    """The reports of all ranks together."""
    z_loss: float | None = None
    """Mean squared log-sum of the counted tokens' logits, of a training step with model.z_loss."""
    mtp_loss: float | None = None
    """Mean loss of the token after the next one, of a training step with model.mtp."""


@dataclass(frozen=True)
class Update:
    applied: bool
    grad_norm: float


class RouterState:
    """Copies of what routers keep beside weights (`RouterKind.state`) and change during the gradients.

    A step that is not applied, or computed again, must leave it as it was. megatron-core changes expert biases as it
    reduces the gradients.
    """

    def __init__(self, model: LanguageModel) -> None:
        names = routers.kind_of(model.config.described.router.kind).state
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        self.here: list[Tensor] = [getattr(router, name) for router in self.routers for name in names]
        self.next: list[Tensor] = []

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Take back what changes inside."""
        before = [buffer.clone() for buffer in self.here]
        for router in self.routers:
            router.begin_batch()
        yield
        for router in self.routers:
            router.end_batch()
        self.next = [buffer.clone() for buffer in self.here]
        self._set(before)

    def apply(self) -> None:
        """Set what was held back."""
        self._set(self.next)

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self.here, values, strict=True):
            buffer.copy_(value)


class Step:
    def __init__(
        self,
        config: RunConfig,
        world: World,
        trainable: Trainable,
        sources: int,
        tell: Callable[[str], None] = lambda news: None,
    ):
        """tell: told once whether micro-batches are CUDA graphs, and why not."""
        self.config, self.world, self.trainable, self.sources = config, world, trainable, sources
        self.model = trainable.model
        self.forward_backward = get_forward_backward_func()
        self.own_time = OwnTime(trainable.model, world.size)
        self.first_seen = FirstSeen(world, trainable.model)
        self.router_state = RouterState(trainable.model)
        self.graphs = Graphs(config, world.size, trainable.reduced, tell)

    def micro_batches(self, global_batch: int | None = None) -> int:
        """Return the number of this rank's micro-batches of a global batch, by default training.global_batch."""
        training = self.config.training
        return (global_batch or training.global_batch) // (training.micro_batch * self.world.data_size)

    def gradients(
        self,
        batches: Iterator[Batch],
        reports: Reports = Reports(),
        global_batch: int | None = None,
    ) -> Losses:
        """Forward and backward over this rank's micro-batches of a global batch; gradients are reduced over all.

        reports: those of this rank. All ranks learn them here, without an exchange of its own.
        """
        self.own_time.take()
        self.first_seen.begin()
        if not self.trainable.reduced.training:
            self.trainable.reduced.train()
        self.trainable.optimizer.zero_grad()
        self.trainable.reduced.zero_grad_buffer()  # the last of the two: it may set `grad`
        for largest_H in self.trainable.largest_logits.values():
            largest_H.fill_(-math.inf)
        with self.router_state.held_back():
            return self._run(batches, global_batch, forward_only=False, reports=reports)

    def update(self) -> Update:
        """Update the weights with the current gradients, or leave them unchanged if these are not finite."""
        try:
            applied, norm, _ = self.trainable.optimizer.step()
        except NonFiniteGradient as bad:
            return Update(False, bad.norm)
        if applied:
            self.router_state.apply()
            if self.trainable.ema is not None:
                self.trainable.ema.update()
        return Update(bool(applied), float(norm))

    def make_room(self) -> None:
        """Free the memory of CUDA graphs, of which the last gradients may be a part."""
        if self.graphs.captured:
            self.trainable.optimizer.zero_grad()
            self.graphs.release()

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], routed_as_trained: bool = False) -> Losses:
        """Return the losses of a global batch, the router choosing as in inference, or as in training."""
        self.make_room()
        self.trainable.reduced.eval()
        routers = [module for module in self.trainable.reduced.modules() if isinstance(module, Router)]
        if routed_as_trained:
            for router in routers:
                router.train()
        counted = ("tokens_E",)  # which are taken with the losses
        kept = [x for router in routers for name, x in router.named_buffers(recurse=False) if name not in counted]
        of_training = [buffer.clone() for buffer in kept]
        try:
            return self._run(batches, None, forward_only=True)
        finally:
            self.trainable.reduced.train()
            for buffer, before in zip(kept, of_training, strict=True):
                buffer.copy_(before)

    def _run(
        self, batches: Iterator[Batch], global_batch: int | None, forward_only: bool, reports: Reports = Reports()
    ) -> Losses:
        count = self.micro_batches(global_batch)
        with nullcontext() if forward_only else self.graphs.step(count):
            sums = self._scheduled(self._read, batches, count, forward_only)
        return self._over_the_world(sums, forward_only, reports)

    def _scheduled(
        self, forward: Callable, batches: Iterator[Batch], micro_batches: int, forward_only: bool
    ) -> list[dict[str, Tensor]]:
        stages: dict[str, Any] = {}
        if self.world.parallel.pipeline > 1:
            wider = partial(between_stages, self.config.model)
            stages["adjust_tensor_shapes_fn"] = lambda received, sent: (wider(received), wider(sent))
        return self.forward_backward(
            forward_step_func=forward,
            data_iterator=batches,
            model=[self.trainable.reduced],
            num_microbatches=micro_batches,
            seq_length=self.config.data.sequence_length,
            micro_batch_size=self.config.training.micro_batch,
            forward_only=forward_only,
            **stages,
        )

    def _read(self, batches: Iterator[Batch], model: torch.nn.Module):
        batch = self.own_time.read(batches)
        self.first_seen.batch(batch["sample_ids"])
        found = self.graphs.run(batch, self._gradients_of) if torch.is_grad_enabled() else None
        if found is None:
            return self._forward(iter([device.copied(batch)]), model)
        return self.first_seen.take(found), lambda loss: (loss, found)  # without a gradient: no backward pass follows

    def _gradients_of(self, batch: Batch) -> Found:
        """Forward and backward over one micro-batch, and what they say of it."""
        (sums,) = self._scheduled(self._forward, iter([batch]), micro_batches=1, forward_only=False)
        return sums | self.first_seen.latest()

    def _forward(self, batches: Iterator[Batch], model: torch.nn.Module):
        batch = next(batches)
        around = (batch.get(side) for side in ("before", "after"))
        return model(batch["tokens"], batch["labels"], *around), partial(self._loss, batch)

    def _loss(self, batch: Batch, losses_BS: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mask_BS = batch["loss_mask"]
        masked_BS = losses_BS * mask_BS
        sums_2B = torch.stack([masked_BS.detach().sum(dim=1), mask_BS.sum(dim=1)]).double()
        of_source = sums_2B.new_zeros(2, self.sources).index_add_(1, batch["source_ids"], sums_2B)
        parts = self.world.parallel.context
        loss = masked_BS.mean() / parts  # the mean over all parts of the sequences
        self.first_seen.loss(loss)
        seen = {"of_source": of_source}
        if (next_BS := self.model.mtp_losses_BS) is not None:
            self.model.mtp_losses_BS = None
            none_B = mask_BS.new_full((len(mask_BS),), -1)
            known_BS = shifted(mask_BS, (batch.get("after", none_B) >= 0).to(mask_BS))
            next_BS = next_BS * known_BS
            loss = loss + self.config.model.mtp.loss * next_BS.mean() / parts
            seen |= {"next": next_BS.detach().double().sum(), "next_tokens": known_BS.double().sum()}
        if (log_sums_BS := self.model.log_sums_BS) is not None:
            seen["squares"] = (log_sums_BS.double().square() * mask_BS).sum()
        return loss, seen

    def _over_the_world(self, sums: list[dict[str, Tensor]], forward_only: bool, reports: Reports) -> Losses:
        """Add up over all ranks what each counted, in one exchange."""
        of_source = torch.zeros(2, self.sources, dtype=torch.float64, device=device.device())
        more = of_source.new_zeros(len(_MORE))
        if self.world.is_last_stage and self.world.tensor_rank == 0:
            for micro_batch in sums:
                of_source += micro_batch["of_source"]
                for place, name in enumerate(_MORE):
                    if name in micro_batch:
                        more[place] += micro_batch[name]
        seconds = [0.0] * (2 * self.world.size)
        seconds[self.world.rank :: self.world.size] = self.own_time.take()
        here = {
            "of_source": of_source,
            "expert_tokens": self.model.take_expert_tokens(),
            "more": more,
            "known": of_source.new_tensor([*reports, *seconds]),
        }
        together = torch.cat([part.flatten().double() for part in here.values()])
        if self.world.size > 1:
            dist.all_reduce(together)
        sizes = [part.numel() for part in here.values()]
        whole = dict(zip(here, together.cpu().split(sizes), strict=True))

        source_sums, source_tokens = whole["of_source"].view(2, -1)
        squares, next_sum, next_tokens = whole["more"].tolist()
        known = whole["known"].tolist()
        seconds = known[len(reports) :]
        tokens = source_tokens.sum()
        return Losses(
            loss=float(source_sums.sum() / tokens),
            tokens=int(tokens),
            source_loss=(source_sums / source_tokens).tolist(),
            source_tokens=source_tokens.long().tolist(),
            expert_tokens=whole["expert_tokens"].view(here["expert_tokens"].shape).long().tolist(),
            computing=seconds[: self.world.size],
            reading=seconds[self.world.size :],
            reports=Reports(*map(int, known[: len(reports)])),
            z_loss=float(squares / tokens) if self.config.model.z_loss and not forward_only else None,
            mtp_loss=next_sum / next_tokens if next_tokens else None,
        )
