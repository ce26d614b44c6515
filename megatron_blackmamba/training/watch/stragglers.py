"""Find ranks that are slow: by the time that each spends on its own work, not on waiting for others.

All ranks end a step together, so the step's time names nobody. `OwnTime` measures the backward pass of layers that
talk to no other rank, and the wait for micro-batches. The numbers travel with the losses of the step.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from megatron_blackmamba.formats.events import Event, RankRecovered, SlowRank
from megatron_blackmamba.layers import kinds_in
from megatron_blackmamba.model import LanguageModel
from megatron_blackmamba.settings import GuardConfig
from megatron_blackmamba.training.watch.ranks import Ranks


class OwnTime:
    """The seconds that this rank spent on its own work since the last `take`."""

    def __init__(self, model: LanguageModel, ranks: int) -> None:
        self.reading = 0.0
        self._spans: list[list[Any]] = []
        self._latest: Any = 0.0
        for block in _timed(model) if ranks > 1 else []:  # alone, nothing is compared
            block.register_forward_hook(self._after_forward)

    def read(self, batches: Iterator[Any]) -> Any:
        """Take the next micro-batch, and note how long that took."""
        begun = time.perf_counter()
        batch = next(batches)
        self.reading += time.perf_counter() - begun
        return batch

    def take(self) -> tuple[float, float]:
        """Return the mean seconds of a layer's backward pass, and the seconds of reading; then start over."""
        if self._spans and not isinstance(self._latest, float):
            self._latest.synchronize()  # the others lie before it in the stream
        seconds = [_between(*span) for span in self._spans if len(span) == 2]
        taken = (sum(seconds) / len(seconds) if seconds else 0.0, self.reading)
        self._spans, self.reading = [], 0.0
        return taken

    def _after_forward(self, block: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor]) -> None:
        _, output = outputs
        if output.requires_grad and inputs[0].requires_grad:
            span: list[Any] = []
            self._spans.append(span)
            output.register_hook(lambda gradient: self._note(span, gradient))
            inputs[0].register_hook(lambda gradient: self._note(span, gradient))

    def _note(self, span: list[Any], gradient: Tensor) -> None:
        self._latest = _now(gradient)
        span.append(self._latest)


@dataclass(frozen=True)
class Slowest:
    """The slowest rank of one step."""

    rank: int
    over_median: float
    """Its time over the median of the other ranks' times."""


def slowest(seconds: list[float]) -> Slowest | None:
    """Return the rank with the most time of its own; None if fewer than two ranks have one."""
    if sum(value > 0 for value in seconds) < 2:
        return None
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    return Slowest(rank, seconds[rank] / median(_others(seconds, rank)))


class Stragglers:
    """Say which ranks stay slow: after each window of steps, those whose median time is far above the others'."""

    def __init__(self, config: GuardConfig, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.slow: set[int] = set()
        self._window: list[tuple[list[float], list[float], float]] = []

    def after_step(self, computing: list[float], reading: list[float], step_seconds: float) -> list[Event]:
        """Note one step, by rank. Return what changed since the last window."""
        self._window.append((computing, reading, step_seconds))
        if len(self._window) < self.config.slow_steps:
            return []
        window, self._window = self._window, []
        computing = _medians([step[0] for step in window])
        reading = _medians([step[1] for step in window])
        limit, hosts = self.config.slow_ratio, self.ranks.hosts
        step = median(step[2] for step in window)
        slow: dict[int, SlowRank] = {}
        for rank in range(len(computing)):
            ratio = computing[rank] / (median(_others(computing, rank) or [0]) or float("inf"))
            late = reading[rank] - median(_others(reading, rank) or [reading[rank]])
            if ratio > limit:
                slow[rank] = SlowRank(rank=rank, host=hosts[rank], steps=len(window), over_median=ratio)
            elif late > (limit - 1) * step:
                slow[rank] = SlowRank(rank=rank, host=hosts[rank], steps=len(window), late_seconds=late)
        events: list[Event] = [event for rank, event in slow.items() if rank not in self.slow]
        events += [RankRecovered(rank=rank, host=hosts[rank]) for rank in sorted(self.slow - slow.keys())]
        self.slow = set(slow)
        return events


def _timed(model: LanguageModel) -> list[nn.Module]:
    """Return the layers of one kind, which talks to no other rank if there is such a kind.

    Layers with experts exchange tokens. Ranks of one tensor- or context-parallel group wait for each other inside any
    layer, and are slow together.
    """
    pattern = model.config.described.pattern
    kinds = kinds_in(pattern)
    timed = next((kind for kind in kinds if not kind.routed), kinds[0])
    return [block for name, block in model.decoder.layers.named_children() if pattern[int(name)] == timed.letter]


def _others(seconds: list[float], rank: int) -> list[float]:
    return [value for other, value in enumerate(seconds) if other != rank and value > 0]


def _medians(rows: list[list[float]]) -> list[float]:
    return torch.tensor(rows, dtype=torch.float64).median(dim=0).values.tolist()


def _now(x: Tensor) -> Any:
    """Return the time at which `x` is ready: on a GPU an event in its stream."""
    if x.is_cuda:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def _between(first: Any, last: Any) -> float:
    if isinstance(first, float):
        return last - first
    return first.elapsed_time(last) / 1e3
