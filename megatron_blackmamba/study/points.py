"""The points of a study: one finished run each, and one file from which the page is made again."""

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
from megatron_blackmamba.formats.evaluations import TaskResult
from megatron_blackmamba.formats.step_records import last_value, metrics_so_far
from megatron_blackmamba.plan import parameters
from megatron_blackmamba.study import generation, length
from megatron_blackmamba.study.config import RATE, PrimaryConfig, StudyError, changed
from megatron_blackmamba.study.runs import Cell, Study

ROUTING = "routing.json"
"""In the folder of a run."""
OLD_NAMES = {
    "group": "variant",
    "learning_rate": "rate",
    "validation": "loss",
    "loss": "training",
    "bits_per_byte": "bits",
    "busiest": "busiest_by_layer",
}
"""Fields of results as version 0.2 wrote them → fields of a point."""


Key = tuple[str, str, str, int, int, tuple[tuple[str, Any], ...]]


def _key(cell: Cell) -> Key:
    return cell.kind, cell.group, cell.size, cell.seed, cell.budget, cell.changed


def _flops(cell: Cell) -> float:
    """Return the training FLOPs of a whole run."""
    return float(cell.step_flops * cell.config.steps)


def read_json(path: Path) -> Any:
    """Return the content of a file; an empty dict without a file."""
    return json.loads(path.read_bytes()) if path.is_file() else {}


@dataclass(frozen=True)
class Point:
    """One finished run."""

    variant: str
    """The variant, or the ablation."""
    size: str
    seed: int
    budget: int
    """Tokens of the study's first variant for the same FLOPs."""
    flops: float
    tokens: int
    """Tokens from the first step on, of the trunk if there is one."""
    repeated: int
    """Of these, the tokens that the run had read before."""
    parameters: int
    active: int
    """Parameters that a token passes through."""
    rate: float
    loss: float
    """Mean validation loss over the sources trained on, in nats per token, with the router as in inference."""
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
    """What its routers do, where an analysis has measured that."""
    seconds: float = 0.0
    """Time of its steps, and of those of its trunk since the point before it."""
    kind: str = "run"
    """tuning, run or ablation."""
    balanced: float | None = None
    """Validation loss with the experts balanced as in training."""
    bits: float | None = None
    """The validation loss as bits per byte of text; None if it was not recorded or not finite."""
    busiest_by_layer: dict[str, float] = field(default_factory=dict)
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """Tokens, FLOPs and validation loss at every validation."""
    tokens_per_second: float = 0.0
    fastest: float = 0.0
    """Tokens per second of the fastest step."""
    memory_bytes: int = 0

    @property
    def plain(self) -> bool:
        """Return whether no grid changed it."""
        return not self.changed

    @property
    def key(self) -> Key:
        """Return what tells it from the other points of a study."""
        return self.kind, self.variant, self.size, self.seed, self.budget, tuple(self.changed.items())


def collect(cell: Cell, corpus: Mapping[str, Any], seconds: float = 0.0) -> Point:
    """Return the point of a finished run; `corpus` has the bytes and tokens of each source.

    seconds: what it adds to the time of the steps of its trunk.
    """
    config = cell.config
    records = list(metrics_so_far(cell.folder.metrics))
    last, counted = records[-1], parameters.count(config)
    validated = [record for record in records if "validation/loss" in record]  # None where it was not finite
    at_end = validated[-1] if validated else {}
    prefix = "validation/loss/"
    losses = {name.removeprefix(prefix): _known(loss) for name, loss in at_end.items() if name.startswith(prefix)}
    recent = [record["loss"] for record in records[-20:] if record.get("loss") is not None]
    tokens, per_token = last["consumed_tokens"], cell.step_flops / config.tokens_per_step
    times = [record["speed/step_seconds"] for record in records if "speed/step_seconds" in record]
    speeds = [record["speed/tokens_per_second"] for record in records if "speed/tokens_per_second" in record]
    by_layer = _busiest(records)
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
        loss=_known(at_end.get("validation/loss")),
        training=statistics.fmean(recent) if recent else math.nan,
        validation=losses,
        bits_per_byte={name: loss / math.log(2) * _tokens_per_byte(corpus[name]) for name, loss in losses.items()},
        changed=dict(cell.changed),
        busiest=max(by_layer.values(), default=None),
        step_seconds=min(times, default=0.0),
        router=read_json(cell.folder.root / ROUTING),
        seconds=seconds + sum(times),
        kind=cell.kind,
        balanced=at_end.get("validation/loss_balanced"),
        bits=last_value(records, "validation/bits_per_byte"),
        busiest_by_layer=by_layer,
        curve=[
            (record["consumed_tokens"], per_token * record["consumed_tokens"], record["validation/loss"])
            for record in validated
            if record["validation/loss"] is not None
        ],
        tokens_per_second=statistics.median(speeds) if speeds else 0.0,
        fastest=max(speeds, default=0.0),
        memory_bytes=int(max(record.get("speed/memory_bytes", 0) for record in records)),
    )


def _busiest(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return by layer the busiest expert's tokens over the mean, as it was last measured in training."""
    for record in reversed(records):
        if found := {name.split("/")[1]: value for name, value in record.items() if name.endswith("/max_over_mean")}:
            return found
    return {}


def _collected(cells: Iterable[Cell], corpus: Mapping[str, Any]) -> Iterator[Point]:
    """Yield the points of the finished cells; a trunk's time counts for the first point that needs it."""
    times: dict[str, dict[int, float]] = {}
    for cell in (cell for cell in cells if cell.done):
        if cell.trunk is not None and cell.chain not in times:
            times[cell.chain] = {r["step"]: r["speed/step_seconds"] for r in metrics_so_far(cell.trunk_metrics)}
        steps = times.get(cell.chain, {})
        yield collect(cell, corpus, sum(steps.pop(step) for step in [*steps] if step <= cell.leaves))


def _known(loss: float | None) -> float:
    return math.nan if loss is None else loss


def _repeated(tokens: int, corpus: Mapping[str, Any]) -> int:
    """Return how many of a run's tokens it had read before; a weight multiplies the tokens of a source."""
    if not corpus:
        return 0
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
    by_length: dict[str, TaskResult] = field(default_factory=dict)
    """The loss by position, of each variant or ablation."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What decides the losses, of a study with branches; empty in files of older versions."""

    @cached_property
    def by_key(self) -> dict[Key, Point]:
        """Return the points by what tells them apart."""
        return {point.key: point for point in self.points}

    @classmethod
    def of(cls, study: Study, known: "Evidence | None" = None, cells: Sequence[Cell] | None = None) -> "Evidence":
        """Return the points of cells, by default of all: those `known` from elsewhere, and those in the folder."""
        cells = study.cells() if cells is None else cells
        corpus, measured = read_json(study.corpus.record), generation.read(study.folder)
        keys = {_key(cell) for cell in cells}
        points = {key: point for key, point in known.by_key.items() if key in keys} if known else {}
        points |= {point.key: point for point in _collected(cells, corpus)}
        theirs = {(one["group"], one["size"]): one for one in (*(known.generation if known else ()), *measured)}
        of_study = (study.name, study.config.about, study.config.first, study.planned, corpus)
        settings = study.config.deciding if study.config.has_branches else {}
        return cls(*of_study, tuple(points.values()), [*theirs.values()], length.results(study, cells), settings)

    def unlike(self, study: Study) -> str | None:
        """Return why these points do not belong to a study in its folder: another corpus, or other settings."""
        if self.corpus != read_json(study.corpus.record):
            return f"has points of another corpus than {study.corpus.folder}"
        if place := changed(self.settings, study.config.deciding):
            return f"has points of other settings than this study: {place} differs"
        other = next((cell for cell in study.cells() if _key(cell) in self.by_key and not self.has(cell)), None)
        return f"has {other.name} with other settings than this study" if other else None

    def has(self, cell: Cell) -> bool:
        """Return whether one of the points is this cell."""
        point, rate = self.by_key.get(_key(cell)), cell.config.optimizer.learning_rate
        return point is not None and (point.rate, point.flops) == (rate, _flops(cell))

    @classmethod
    def read(cls, path: Path, study: Study) -> "Evidence":
        """Return what a file of points says."""
        try:
            content = json.loads(path.read_bytes())
            if isinstance(content, list) and not study.config.has_branches:
                content = _of_results(content, study)
            return TypeAdapter(cls).validate_python(content)
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


def _of_results(results: list[Any], study: Study) -> dict[str, Any]:
    """Return the results of whole runs, as version 0.2 wrote them, in the form of today."""
    points: list[dict[str, Any]] = []
    for result in results:
        renamed = {OLD_NAMES.get(name, name): value for name, value in result.items() if name != "name"}
        changed = {RATE: result["learning_rate"]} if result["kind"] == "tuning" else {}
        points.append(renamed | {"budget": 0, "repeated": 0, "validation": {}, "bits_per_byte": {}, "changed": changed})
    about = {"name": study.name, "about": study.config.about, "first": study.config.first, "planned": len(results)}
    return {**about, "corpus": {}, "points": points}


def declared_losses(points: Sequence[Point], declared: PrimaryConfig) -> dict[int, tuple[float, float]]:
    """Return both losses, or gains, of a declared comparison for each of its seeds that is finished."""
    losses = [
        {p.seed: p.loss for p in chosen(points, variant=variant, size=declared.size, budget=declared.budget)}
        for variant in declared.variants
    ]
    finished = [seed for seed in declared.seeds if all(seed in known for known in losses)]
    if declared.gain_on is None:
        return {seed: (losses[0][seed], losses[1][seed]) for seed in finished}
    one, other, less_one, less_other = losses
    return {seed: (one[seed] - less_one[seed], other[seed] - less_other[seed]) for seed in finished}


def sealed(points: Sequence[Point], primary: Sequence[PrimaryConfig]) -> list[Point]:
    """Return the points without those of declared comparisons that have not all of their seeds."""
    waiting = [each for each in primary if len(declared_losses(points, each)) < len(each.seeds)]
    hidden = {(v, each.size, seed) for each in waiting for v in each.variants for seed in each.seeds}
    return [point for point in points if (point.variant, point.size, point.seed) not in hidden]


def chosen(points: Iterable[Point], **keys: Any) -> list[Point]:
    """Return the points with given fields, by seed and then by rising budget."""
    found = [point for point in points if all(getattr(point, key) == value for key, value in keys.items())]
    return sorted(found, key=lambda point: (point.seed, point.budget))


def unique(points: Iterable[Point], key: str) -> list[Any]:
    """Return the values of a field in the order in which they first come."""
    return list(dict.fromkeys(getattr(point, key) for point in points))
