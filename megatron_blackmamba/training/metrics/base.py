"""The metric class, the registry of metrics, and the record of a step."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from megatron_blackmamba.formats.step_records import StepRecord

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_blackmamba.config import RunConfig
    from megatron_blackmamba.data import DataPlan
    from megatron_blackmamba.model import LanguageModel
    from megatron_blackmamba.training.step.optimizer import Trainable
    from megatron_blackmamba.training.step.progress import Progress
    from megatron_blackmamba.training.step.step import Losses, Update
    from megatron_blackmamba.training.watch.speed import Utilisation


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A step just taken: all that a metric may look at."""

    config: "RunConfig"
    progress: "Progress"
    """The position of the run after the step."""
    data: "DataPlan"
    trainable: "Trainable"
    """Its weights may be those of the step before: metrics read `model` or `own_weights`."""
    utilisation: "Utilisation"
    losses: "Losses"
    update: "Update"
    learning_rate: float
    tokens: int
    """Tokens of the step's batch."""
    seconds: float
    validation: Mapping[str, float] = field(default_factory=dict)
    """Validation loss by source; empty unless it was due."""
    validation_as_trained: Mapping[str, float] = field(default_factory=dict)
    """The same with the experts balanced as in training; empty unless training.validate_balanced asks for it."""
    validation_of_average: Mapping[str, float] = field(default_factory=dict)
    """The same of the averaged weights; empty without training.ema."""
    bytes_per_token: Mapping[str, float] = field(default_factory=dict)
    """Bytes of text per validated token by source; empty unless validated with a tokenizer that tells them."""

    @property
    def step(self) -> int:
        """Return the number of the step."""
        return self.progress.step

    @cached_property
    def model(self) -> "LanguageModel":
        """This rank's part of the model, all its weights updated. Read it on every rank or on none: ranks exchange."""
        self.trainable.settle()
        return self.trainable.model

    @cached_property
    def own_weights(self) -> "list[Tensor]":
        """This rank's parts of the weights, updated. Each part of a weight is on one rank, whatever the layout."""
        from megatron_blackmamba.model.initialise import shards

        from megatron.core.dist_checkpointing.mapping import is_main_replica

        buffers = dict(self.model.named_buffers())
        found = (shard for shard in shards(self.model.sharded_state_dict()) if shard.key not in buffers)
        return [shard.data.detach() for shard in found if is_main_replica(shard.replica_id)]


Key = str | tuple[str, ...]
Number = float | tuple[float, float]
"""A pair is a sum and a count: a mean over ranks that counts as much."""
Value = Number | Mapping[str, Number] | Mapping[Key, Number] | None
"""None is left out. A mapping gives one scalar a key: it fills the `*` of the name, a tuple several."""
Scalars = dict[str, Any]
"""Numbers by name."""
Due = Callable[[Taken], bool]
Measure = TypeVar("Measure", bound=Callable[[Taken], Value])
Reduce = Literal["sum", "mean", "max", "norm"]


class MetricError(ValueError):
    """A metric whose name is taken, or whose value does not fit its name."""


@dataclass(frozen=True)
class Metric:
    """A function of a step, and how its value is shown."""

    name: str
    """Name of the scalar, such as `speed/mfu`. A `*` stands for the keys of a mapping: `source/loss/*`."""
    measure: Callable[[Taken], Value]
    title: str
    """For the report and the table on a terminal."""
    format: str | Callable[[float], str] = ".4f"
    """A format specification of Python, or a function; empty text is not shown."""
    unit: str = ""
    due: Due = lambda taken: True
    """Says at which steps to measure; with `reduce`, the same on every rank."""
    reduce: Reduce | None = None
    """How the values of all ranks become one: a `norm` is the root of the sum of squares. None: rank 0's counts."""
    label: str = ""
    """Words before the value in the one-line log; the unit stands behind it."""
    in_line: bool = False
    """Show it in the one-line log and in the table on a terminal."""
    in_table: bool = False
    """Show it in the table on a terminal only."""
    in_report: bool = True
    """Draw it in the report, if the report does not show it in a way of its own."""
    from_zero: bool = False
    """Let the axis of the report begin at 0."""
    order: int = 100
    """Position among the metrics; ties are in order of registration."""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        parts = [re.escape(part) for part in self.name.split("*")]
        head = "([^/]+)".join(parts[:-1])
        return re.compile(f"{head}(.+){parts[-1]}" if self.many else parts[0])

    @cached_property
    def many(self) -> bool:
        """Return whether the metric has one scalar for each of several keys."""
        return "*" in self.name

    def key_of(self, scalar: str) -> str | None:
        """Return the key in a scalar's name: empty for a metric with one value, None for another metric's scalar."""
        found = self.pattern.fullmatch(scalar)
        return None if found is None else "/".join(found.groups())

    def scalars(self, taken: Taken) -> Scalars:
        """Measure on this rank, if it is due."""
        value = self.measure(taken) if self.due(taken) else None
        if value is None:
            return {}
        if isinstance(value, Mapping) != self.many:
            raise MetricError(
                f"{self.name} has the value {value!r}: a mapping fills a `*` in the name, a number has none"
            )
        found = (
            {self._scalar(key): one for key, one in value.items()} if isinstance(value, Mapping) else {self.name: value}
        )
        if self.reduce != "mean" and any(isinstance(one, tuple) for one in found.values()):
            raise MetricError(f"{self.name} has the value {value!r}: a sum with a count needs reduce='mean'")
        return found

    def _scalar(self, key: Key) -> str:
        """Return the name with the parts of a key in place of the stars."""
        keys, parts = (key,) if isinstance(key, str) else key, self.name.split("*")
        if len(keys) != len(parts) - 1:
            raise MetricError(
                f"{self.name} has the key {key!r}: each `*` of the name takes one part."
                f" Return keys of {len(parts) - 1} {'parts as tuples' if len(parts) > 2 else 'part'}."
            )
        return parts[0] + "".join(f"{one}{part}" for one, part in zip(keys, parts[1:], strict=True))

    def of(self, scalars: Mapping[str, float]) -> dict[str, float]:
        """Return this metric's scalars by key."""
        if not self.many:
            return {"": scalars[self.name]} if self.name in scalars else {}
        return {key: value for name, value in scalars.items() if (key := self.key_of(name)) is not None}

    def text(self, value: float | None) -> str:
        """Return a value as shown to people."""
        if value is None or value != value:
            return "–"
        number = self.format(value) if callable(self.format) else format(value, self.format)
        return f"{number} {self.unit}".rstrip()


_METRICS: dict[str, Metric] = {}


def metric(name: str, title: str, **shown: Any) -> Callable[[Measure], Measure]:
    """Register the decorated function as a metric; the keywords are fields of Metric."""

    def register(measure: Measure) -> Measure:
        if name in _METRICS:
            raise MetricError(f"two metrics have the name {name}: give one of them another")
        _METRICS[name] = Metric(name, measure, title, **shown)
        return measure

    return register


def unregister(name: str) -> None:
    """Remove a metric."""
    del _METRICS[name]


def all_metrics() -> list[Metric]:
    """Return every metric in the order of display."""
    return sorted(_METRICS.values(), key=attrgetter("order"))


def metric_of(scalar: str) -> Metric:
    """Return the metric of a scalar, the most specific first; one made up for a scalar that nobody registered."""
    known = _METRICS.get(scalar)
    found = [known] if known else [each for each in all_metrics() if each.key_of(scalar) is not None]
    return found[0] if found else Metric(scalar, lambda taken: None, scalar)


def record(taken: Taken) -> StepRecord:
    """Return the record of a step: every metric that is due, over all ranks if it says how. Every rank calls this."""
    found = {each: each.scalars(taken) for each in all_metrics() if each.due(taken)}
    if shared := {each.name: scalars for each, scalars in found.items() if each.reduce}:
        from megatron_blackmamba.runtime.world import gathered

        everywhere = gathered(shared)
        for each in found:
            if each.reduce:
                found[each] = _reduced(each.reduce, [of_rank[each.name] for of_rank in everywhere])
    return StepRecord(taken.step, {name: value for scalars in found.values() for name, value in scalars.items()})


def _reduced(how: Reduce, everywhere: Iterable[Scalars]) -> Scalars:
    """Reduce each scalar over the ranks that have it."""
    values: dict[str, list[Number]] = {}
    for scalars in everywhere:
        for name, value in scalars.items():
            values.setdefault(name, []).append(value)
    return {name: _REDUCTIONS[how](some) for name, some in values.items()}


def _mean(values: list[Number]) -> float:
    sums, counts = zip(*(value if isinstance(value, tuple) else (value, 1.0) for value in values), strict=True)
    return math.fsum(sums) / math.fsum(counts) if any(counts) else math.nan


_REDUCTIONS: dict[str, Callable[[list[Any]], float]] = {
    "sum": math.fsum,
    "mean": _mean,
    "max": lambda values: math.nan if any(map(math.isnan, values)) else max(values),
    "norm": lambda values: math.hypot(*values),
}
