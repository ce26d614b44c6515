"""The history of a run, from its files: measurements of every step, the plan, and interruptions."""

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_blackmamba.config import RunConfig, read_saved
from megatron_blackmamba.formats.branches import Trunk, trunk_of, trunks_of
from megatron_blackmamba.formats.events import Event, Resumed, Rewound, Spike, of_kind, read_events
from megatron_blackmamba.formats.lasting_events import Start, lasting_starts, still_valid
from megatron_blackmamba.formats.run_folder import MANIFEST, RunFolder, near
from megatron_blackmamba.formats.step_records import metrics_so_far
from megatron_blackmamba.training.metrics import metric_of

SAMPLES = "samples.json"


class ReportError(ValueError):
    """There is nothing to report on; the message says why."""


@dataclass(frozen=True)
class Series:
    """A scalar at the steps that have it; NaN where it was not finite."""

    step: np.ndarray
    value: np.ndarray


@dataclass
class History:
    """The scalars and events of a run, its config and its plan."""

    name: str
    folder: RunFolder
    config: dict[str, Any]
    plan: dict[str, Any]
    steps: int
    """How many are recorded."""
    scalars: dict[str, "Series"]
    """Every scalar of metrics.jsonl, by name."""
    last: dict[str, Any]
    """The last record."""
    skipped: list[tuple[int, str]] = field(default_factory=list)
    remarks: list[tuple[int, str]] = field(default_factory=list)
    """Other events that a reader should know: spikes, devices that failed, slow ranks, damaged checkpoints."""
    restarts: list[int] = field(default_factory=list)
    """Steps after which it was started again, other than to change its config."""
    rewinds: list[int] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    """Changes of the config on resumes, each with its step, that influenced the weights or the routing."""
    samples: dict[str, str] = field(default_factory=dict)
    spikes: list[Spike] = field(default_factory=list)
    """Those of rewound steps too."""
    begun: list[Start] = field(default_factory=list)
    """Its starts, with what they knew of the machine and the model."""
    processes: list[int] = field(default_factory=list)
    """Numbers of processes that trained it, in order; none in runs of older versions."""
    trunk: Trunk | None = None
    """Where it branches from another run."""
    before: "History | None" = None
    """The trunk up to the branch, if its records are there."""

    @property
    def total_steps(self) -> int:
        """Return the steps taken plus the steps left for the remaining tokens; the batch size may have changed."""
        return self.last["step"] + RunConfig.model_validate(self.config).steps_left(self.last["consumed_samples"])

    @property
    def trunks(self) -> Iterator["History"]:
        """Yield the part of the trunk that this run goes on from, the part before that of its own trunk, and so on."""
        at = self.before
        while at is not None:
            yield at
            at = at.before

    @property
    def hours_before(self) -> float:
        """Return the hours that the steps of the trunks took."""
        return sum(float(np.nansum(each.scalars["speed/step_seconds"].value)) for each in self.trunks) / 3600

    def of(self, metric: str) -> dict[str, "Series"]:
        """Return the series of a metric such as `source/loss/*`, by key."""
        found = {name: metric_of(metric).key_of(name) for name in self.scalars}
        return {key: self.scalars[name] for name, key in found.items() if key is not None}

    @property
    def validation_loss(self) -> "Series | None":
        """Return the mixture-weighted mean of the sources' losses, computed here for runs that did not record it."""
        by_source = self.of("validation/loss/*")
        if "validation/loss" in self.scalars or not by_source:
            return self.scalars.get("validation/loss")
        return weighted_mean(by_source, self.planned)

    @property
    def bits_per_byte(self) -> "Series | None":
        """Return the validation loss in bits per byte of text, if it was recorded."""
        return self.scalars.get("validation/bits_per_byte")

    @property
    def finished(self) -> bool:
        return self.folder.done.exists()

    @property
    def planned(self) -> dict[str, float]:
        """Return the planned share of each source over the samples consumed so far."""
        phases = self.plan.get("phases") or []
        consumed = self.last["consumed_samples"]
        if self.trunk and self.trunk.relength:  # its data begins anew
            consumed -= self.trunk.consumed_samples
        shares: dict[str, float] = {}
        for i, phase in enumerate(phases):
            end = phases[i + 1]["from_sample"] if i + 1 < len(phases) else consumed
            samples = max(0, min(end, consumed) - phase["from_sample"])
            for name, share in phase["shares"].items():
                shares[name] = shares.get(name, 0.0) + _fraction(share) * samples
        return {name: share / consumed for name, share in shares.items()} if consumed else {}

    @property
    def achieved(self) -> dict[str, float]:
        counts = metric_of("source/samples/*").of(self.last)
        total = sum(counts.values())
        return {name: count / total for name, count in counts.items()} if total else {}


def weighted_mean(by_source: Mapping[str, Series], shares: Mapping[str, float]) -> Series:
    """Return the mean over the sources at each step, weighted by their shares, or equally if they have none."""
    weights = {name: shares.get(name, 0.0) for name in by_source}
    if not any(weights.values()):
        weights = dict.fromkeys(by_source, 1.0)
    total: dict[int, list[tuple[float, float]]] = {}
    for name, series in by_source.items():
        for step, value in zip(series.step.tolist(), series.value.tolist(), strict=True):
            total.setdefault(step, []).append((weights[name], value))
    means = {step: _weighted(pairs) for step, pairs in sorted(total.items())}
    return Series(np.array(list(means)), np.array(list(means.values())))


def read_history(run: Path) -> History:
    """Read everything that the report shows, from a finished or unfinished run, with the trunks it branches from."""
    chain, before = list(trunks_of(RunFolder(run))), None
    for trunk in reversed(chain):
        try:
            before = replace(_read_run(trunk.run.root, trunk.step), before=before)
        except ReportError:  # what is left of the trunk cannot be drawn
            before = None
    return replace(_read_run(run), before=before)


def _read_run(run: Path, until: int | None = None) -> History:
    """Read one run, or its steps up to one."""
    folder = RunFolder(run)
    if not folder.config.is_file():
        if launched(folder):
            raise ReportError(f"{run} was launched but has not begun: look at squeue --me and {folder.logs}")
        if not run.is_dir():
            raise ReportError(f"{run}: no such folder{near(run)} Name a run, such as runs/tiny")
        inside = [path.parent for path in sorted(run.glob(f"*/{folder.metrics.name}"))]
        hint = f"did you mean {inside[0]}?" if inside else "Name a folder such as runs/tiny"
        raise ReportError(f"{run} is not a run: it has no {folder.config.name}. {hint}")
    recorded = _read(folder.metrics, until)
    if not recorded.last:
        if folder.latest.is_file() or folder.done.is_file():
            raise ReportError(f"{folder.metrics} has no steps, although the run has saved: it was removed or emptied")
        if (run / MANIFEST).is_file():
            raise ReportError(
                f"{run}: an imported model or a checkpoint has no training to show. `blackmamba evaluate MODEL --text"
                " FILE` scores it, and a run alike"
            )
        raise ReportError(f"{run} has no step in {folder.metrics.name} yet: try again after its first step")
    happened = [occurrence.event for occurrence in read_events(folder.events)]
    begun = [event for event in happened if isinstance(event, Start)]
    bad = {event.step: event.text for event in still_valid(happened) if event.repeats}
    samples = run / SAMPLES
    return History(
        name=run.resolve().name,
        folder=folder,
        config=read_saved(folder.config, known_kinds=False).model_dump(mode="json", by_alias=True),
        plan=json.loads(folder.data_plan.read_bytes()) if folder.data_plan.is_file() else {},
        steps=recorded.steps,
        scalars={name: Series(np.array(steps), np.array(values)) for name, (steps, values) in recorded.scalars.items()},
        last=recorded.last,
        skipped=[(step, bad.get(step) or recorded.notes.get(step, "not applied")) for step in sorted(recorded.skipped)],
        remarks=_remarks(happened, recorded),
        restarts=[
            step for e in of_kind(happened, Resumed) if (step := e.step or 0) < recorded.last["step"] and not e.changes
        ],
        rewinds=[event.to for event in of_kind(happened, Rewound)],
        changes=[change for start in lasting_starts(happened) for change in getattr(start, "changes", ())],
        samples=json.loads(samples.read_bytes()) if samples.is_file() else {},
        spikes=of_kind(happened, Spike),
        begun=begun,
        processes=list(dict.fromkeys(event.processes for event in begun if event.processes)),
        trunk=trunk_of(folder),
    )


def launched(run: RunFolder) -> bool:
    """Return whether a job of the run was submitted, and none of its jobs has written the run's config yet."""
    return not run.config.is_file() and any(run.launches.glob("*/job.sbatch"))


@dataclass(frozen=True)
class Thinned:
    """A curve in few points: the mean of each stretch, and how far it reaches up and down within it."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def thin(x: np.ndarray, y: np.ndarray, points: int = 400) -> Thinned:
    """Summarise a curve in at most `points` intervals of equal length, ignoring values that are not finite."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= points:
        return Thinned(x, y, y, y)
    starts = np.linspace(0, len(x), points, endpoint=False).astype(int)
    counts = np.diff(np.append(starts, len(x)))
    return Thinned(
        np.add.reduceat(x, starts) / counts,
        np.add.reduceat(y, starts) / counts,
        np.minimum.reduceat(y, starts),
        np.maximum.reduceat(y, starts),
    )


class _Recorded:
    """The content of metrics.jsonl, in typed columns, since a long run has millions of values."""

    def __init__(self) -> None:
        self.steps = 0
        self.scalars: dict[str, tuple[array[int], array[float]]] = {}
        self.skipped: set[int] = set()
        self.notes: dict[int, str] = {}
        """What the guard remarked on, in runs from before events.jsonl."""
        self.last: dict[str, Any] = {}


def _read(path: Path, until: int | None = None) -> _Recorded:
    found = _Recorded()
    for record in metrics_so_far(path):
        step = record["step"]
        if until is not None and step > until:
            break
        found.steps, found.last = found.steps + 1, record
        if record.get("skipped"):
            found.skipped.add(step)
        if record.get("note"):
            found.notes[step] = str(record["note"])
        for name, value in record.items():
            if name != "step" and (value is None or isinstance(value, int | float)):
                if name not in found.scalars:
                    found.scalars[name] = array("q"), array("d")
                steps, values = found.scalars[name]
                steps.append(step)
                values.append(math.nan if value is None else value)
    return found


def _remarks(events: list[Event], recorded: _Recorded) -> list[tuple[int, str]]:
    """Return step and text of every event to remark on, but for skipped steps; older runs have notes instead."""
    skipped = recorded.skipped
    notes = [(step, note) for step, note in recorded.notes.items() if step not in skipped]
    valid = (event for event in still_valid(events) if event.remark and not (event.repeats and event.step in skipped))
    return notes + [(event.step or 0, event.text) for event in valid]


def _weighted(pairs: list[tuple[float, float]]) -> float:
    """Return the mean of values, each with its weight."""
    total = sum(weight for weight, _ in pairs)
    return sum(weight * value for weight, value in pairs) / total if total else math.nan


def _fraction(text: str) -> float:
    above, _, below = str(text).partition("/")
    return float(above) / float(below or 1)
