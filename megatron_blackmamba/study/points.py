"""The points of a study with trunks and branches: one model each, and one file from which the page is made again."""

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.step_records import metrics_so_far
from megatron_blackmamba.plan import parameters
from megatron_blackmamba.study import generation
from megatron_blackmamba.study.config import StudyError
from megatron_blackmamba.study.results import busiest
from megatron_blackmamba.study.runs import Cell, Study

FILE = "points.json"
ROUTING = "routing.json"
"""In the folder of a run."""


Key = tuple[str, str, int, int, tuple[tuple[str, Any], ...]]


def _key(cell: Cell) -> Key:
    return cell.group, cell.size, cell.seed, cell.budget, cell.changed


def _flops(cell: Cell) -> float:
    """Return the training FLOPs of a whole run."""
    return float(cell.step_flops * cell.config.steps)


def read_json(path: Path) -> Any:
    """Return the content of a file; an empty dict without a file."""
    return json.loads(path.read_bytes()) if path.is_file() else {}


@dataclass(frozen=True)
class Point:
    """One finished branch."""

    variant: str
    size: str
    seed: int
    budget: int
    """Tokens of the study's first variant for the same FLOPs."""
    flops: float
    tokens: int
    """Tokens from the first step of the trunk on."""
    repeated: int
    """Of these, the tokens that the run had read before."""
    parameters: int
    active: int
    rate: float
    loss: float
    """Mean validation loss over the sources that were trained on, in nats per token."""
    training: float
    """Training loss, the mean over the last 20 steps."""
    validation: dict[str, float]
    """Validation loss of each set, in nats per token."""
    bits_per_byte: dict[str, float]
    changed: dict[str, Any] = field(default_factory=dict)
    """Keys of a grid and their values."""
    busiest: float | None = None
    """The busiest expert's tokens over the mean in training, in the least balanced layer at the end."""
    step_seconds: float = 0.0
    """Time of the fastest step, which stands for an idle machine."""
    router: dict[str, float] = field(default_factory=dict)
    """What its routers do (`routing.MEANING`), where that has been measured."""
    seconds: float = 0.0
    """Time of its steps, and of those of its trunk since the point before it."""

    @property
    def plain(self) -> bool:
        """Return whether no grid changed it."""
        return not self.changed

    @property
    def key(self) -> Key:
        """Return what tells it from the other points of a study."""
        return self.variant, self.size, self.seed, self.budget, tuple(self.changed.items())


def collect(cell: Cell, corpus: Mapping[str, Any], seconds: float = 0.0) -> Point:
    """Return the point of a finished branch; `corpus` has the bytes and tokens of each source.

    seconds: what it adds to the time of the steps of its trunk.
    """
    config = cell.config
    records = list(metrics_so_far(cell.folder.metrics))
    last, counted = records[-1], parameters.count(config)
    prefix = "validation/loss/"
    losses = {name.removeprefix(prefix): _known(loss) for name, loss in last.items() if name.startswith(prefix)}
    tokens = last["consumed_tokens"]
    return Point(
        variant=cell.group,
        size=cell.size,
        seed=cell.seed,
        budget=cell.budget,
        flops=_flops(cell),
        tokens=tokens,
        repeated=_repeated(tokens, corpus),
        parameters=counted.total,
        active=counted.forward,
        rate=config.optimizer.learning_rate,
        loss=_known(last["validation/loss"]),
        training=statistics.fmean(_known(record["loss"]) for record in records[-20:]),
        validation=losses,
        bits_per_byte={name: loss / math.log(2) * _tokens_per_byte(corpus[name]) for name, loss in losses.items()},
        changed=dict(cell.changed),
        busiest=max(busiest(records).values(), default=None),
        step_seconds=min(record["speed/step_seconds"] for record in records),
        router=read_json(cell.folder.root / ROUTING),
        seconds=seconds + sum(record["speed/step_seconds"] for record in records),
    )


def _collected(cells: Iterable[Cell], corpus: Mapping[str, Any]) -> Iterator[Point]:
    """Yield the points of the finished cells; a trunk's time counts for the first point that needs it."""
    times: dict[str, dict[int, float]] = {}
    for cell in (cell for cell in cells if cell.done):
        if cell.chain not in times:
            times[cell.chain] = {r["step"]: r["speed/step_seconds"] for r in metrics_so_far(cell.trunk_metrics)}
        steps = times[cell.chain]
        yield collect(cell, corpus, sum(steps.pop(step) for step in [*steps] if step <= cell.leaves))


def _known(loss: float | None) -> float:
    return math.nan if loss is None else loss


def _repeated(tokens: int, corpus: Mapping[str, Any]) -> int:
    """Return how many of a run's tokens it had read before; a weight multiplies the tokens of a source."""
    weighted = {name: counts["weight"] * counts["train"]["tokens"] for name, counts in corpus.items()}
    once = {
        name: corpus[name]["train"]["tokens"] * sum(weighted.values()) / each for name, each in weighted.items() if each
    }
    return round(sum(max(0.0, tokens - most) * weighted[name] for name, most in once.items()) / sum(weighted.values()))


def _tokens_per_byte(counts: Mapping[str, Any]) -> float:
    return counts["validation"]["tokens"] / counts["validation"]["bytes"]


@dataclass(frozen=True)
class Evidence:
    """The question of a study, its corpus, and the points that are finished."""

    name: str
    about: str
    first: str
    planned: int
    corpus: dict[str, Any]
    points: tuple[Point, ...]
    generation: list[dict[str, Any]] = field(default_factory=list)
    """Time of a token and bytes of the state at some lengths, of each variant and size."""

    @cached_property
    def by_key(self) -> dict[Key, Point]:
        """Return the points by what tells them apart."""
        return {point.key: point for point in self.points}

    @classmethod
    def of(cls, study: Study, cells: Sequence[Cell], known: "Evidence | None" = None) -> "Evidence":
        """Return the points of cells: those `known` from elsewhere, and those in the study's folder."""
        corpus, measured = read_json(study.corpus.record), generation.read(study.folder)
        keys = {_key(cell) for cell in cells}
        points = {key: point for key, point in known.by_key.items() if key in keys} if known else {}
        points |= {point.key: point for point in _collected(cells, corpus)}
        theirs = {(one["group"], one["size"]): one for one in (*(known.generation if known else ()), *measured)}
        of_study = (study.name, study.config.about, study.config.first, len(cells), corpus)
        return cls(*of_study, tuple(points.values()), [*theirs.values()])

    def unlike(self, study: Study) -> str | None:
        """Return why these points do not belong to a study in its folder: another corpus, or other settings."""
        if self.corpus != read_json(study.corpus.record):
            return f"has points of another corpus than {study.corpus.folder}"
        rates = study.learning_rates()
        cells = study.runs(rates) if rates else []
        other = next((cell for cell in cells if _key(cell) in self.by_key and not self.has(cell)), None)
        return f"has {other.name} with other settings than this study" if other else None

    def has(self, cell: Cell) -> bool:
        """Return whether one of the points is this cell."""
        point, rate = self.by_key.get(_key(cell)), cell.config.optimizer.learning_rate
        return point is not None and (point.rate, point.flops) == (rate, _flops(cell))

    @classmethod
    def read(cls, path: Path) -> "Evidence":
        """Return what a file of points says."""
        try:
            return TypeAdapter(cls).validate_python(json.loads(path.read_bytes()))
        except ValidationError as error:
            found = error.errors()[0]
            why = f"{'.'.join(map(str, found['loc'])) or 'its content'}: {found['msg']}"
        except (OSError, ValueError) as error:
            why = str(error)
        raise StudyError(f"{path} cannot be read as the points of a study: {why}")

    def write(self, path: Path) -> None:
        """Write the file of points."""
        atomic.write_json(path, {**asdict(self), "points": [asdict(point) for point in self.points]})

    @property
    def plain(self) -> list[Point]:
        """Return the points that no grid changed."""
        return [point for point in self.points if point.plain and math.isfinite(point.loss)]


def chosen(points: Iterable[Point], **keys: Any) -> list[Point]:
    """Return the points with given fields, by seed and then by rising budget."""
    found = [point for point in points if all(getattr(point, key) == value for key, value in keys.items())]
    return sorted(found, key=lambda point: (point.seed, point.budget))


def unique(points: Iterable[Point], key: str) -> list[Any]:
    """Return the values of a field in the order in which they first come."""
    return list(dict.fromkeys(getattr(point, key) for point in points))
