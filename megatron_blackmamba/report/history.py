"""A run as its files tell it: what was measured at every step, what was planned, where it was interrupted."""

import json
import math
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_blackmamba.config import read_saved
from megatron_blackmamba.formats.events import Event, Resumed, Rewound, of_kind, read_events, still_valid
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.training.metrics import read_metrics

SAMPLES = "samples.json"
STEPWISE = ("loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu")


class ReportError(ValueError):
    """There is nothing to report on; the message says why."""


@dataclass
class History:
    """Columns over the steps recorded; NaN where a step has no value."""

    name: str
    folder: RunFolder
    config: dict[str, Any]
    plan: dict[str, Any]
    step: np.ndarray
    columns: dict[str, np.ndarray]
    source_loss: dict[str, np.ndarray]
    validation: dict[str, list[tuple[int, float]]]
    router: list[tuple[int, dict[str, dict[str, Any]]]]
    """Step, and each MoE layer's load, where the router was looked at."""
    last: dict[str, Any]
    skipped: list[tuple[int, str]] = field(default_factory=list)
    remarks: list[tuple[int, str]] = field(default_factory=list)
    """Other events that a reader should know: spikes, devices that failed, slow ranks, damaged checkpoints."""
    restarts: list[int] = field(default_factory=list)
    rewinds: list[int] = field(default_factory=list)
    samples: dict[str, str] = field(default_factory=dict)

    @property
    def total_steps(self) -> int:
        """Those taken, and those that the tokens still to train make: the batch may have changed on the way."""
        training = self.config["training"]
        per_step = training["global_batch"] * self.config["data"]["sequence_length"]
        left = max(0, training["tokens"] - self.last["consumed_tokens"])
        return self.last["step"] + -(-left // per_step)

    @property
    def finished(self) -> bool:
        return self.folder.done.exists()

    @property
    def planned(self) -> dict[str, float]:
        """The share of each source that the plan asks for, over the samples consumed so far."""
        phases = self.plan.get("phases") or []
        consumed = self.last["consumed_samples"]
        shares: dict[str, float] = {}
        for i, phase in enumerate(phases):
            end = phases[i + 1]["from_sample"] if i + 1 < len(phases) else consumed
            samples = max(0, min(end, consumed) - phase["from_sample"])
            for name, share in phase["shares"].items():
                shares[name] = shares.get(name, 0.0) + _fraction(share) * samples
        return {name: share / consumed for name, share in shares.items()} if consumed else {}

    @property
    def achieved(self) -> dict[str, float]:
        counts = self.last.get("source_samples") or {}
        total = sum(counts.values())
        return {name: count / total for name, count in counts.items()} if total else {}


def read_history(run: Path) -> History:
    """Everything the report shows, from a run that is finished or still going on."""
    folder = RunFolder(run)
    if not folder.config.is_file():
        inside = [path.parent for path in sorted(run.glob(f"*/{folder.metrics.name}"))]
        hint = f"did you mean {inside[0]}?" if inside else "Name a folder such as runs/tiny"
        raise ReportError(f"{run} is not a run: it has no {folder.config.name}. {hint}")
    records = list(read_metrics(folder.metrics))
    if not records:
        raise ReportError(f"{run} has no step in {folder.metrics.name} yet: come back once it has trained one")
    steps = np.array([record["step"] for record in records])
    sources = list(dict.fromkeys(name for record in records for name in record.get("source_loss") or {}))
    validation: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, loss in (record.get("validation_loss") or {}).items():
            if loss is not None:
                validation.setdefault(name, []).append((record["step"], loss))
    happened = [occurrence.event for occurrence in read_events(folder.events)]
    bad = {event.step: event.text for event in still_valid(happened) if event.repeats}
    skipped = {record["step"]: record.get("note") for record in records if record.get("skipped")}
    samples = run / SAMPLES
    return History(
        name=run.resolve().name,
        folder=folder,
        config=read_saved(folder.config).model_dump(mode="json", by_alias=True),
        plan=json.loads(folder.data_plan.read_bytes()) if folder.data_plan.is_file() else {},
        step=steps,
        columns={name: _column(record.get(name) for record in records) for name in STEPWISE},
        source_loss={
            name: _column((record.get("source_loss") or {}).get(name) for record in records) for name in sources
        },
        validation=validation,
        router=[(record["step"], record["router_load"]) for record in records if record.get("router_load")],
        last=records[-1],
        skipped=[(step, bad.get(step) or note or "not applied") for step, note in skipped.items()],
        remarks=_remarks(happened, records, skipped),
        restarts=[event.step or 0 for event in of_kind(happened, Resumed)],
        rewinds=[event.to for event in of_kind(happened, Rewound)],
        samples=json.loads(samples.read_bytes()) if samples.is_file() else {},
    )


@dataclass(frozen=True)
class Thinned:
    """A curve in few points: the mean of each stretch, and how far it reaches up and down within it."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def thin(x: np.ndarray, y: np.ndarray, points: int = 400) -> Thinned:
    """At most `points` stretches of equal length; what is not a number counts for nothing."""
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


def _remarks(events: list[Event], records: list[dict[str, Any]], skipped: Container[int]) -> list[tuple[int, str]]:
    """Return step and text of every event to remark on; runs from before events.jsonl have notes of steps instead."""
    notes = [(record["step"], record["note"]) for record in records if record.get("note")]
    valid = (event for event in still_valid(events) if event.remark and not (event.repeats and event.step in skipped))
    remarks = [(event.step or 0, event.text) for event in valid]
    return [(step, text) for step, text in notes if step not in skipped] + remarks


def _column(values: Any) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], dtype=float)


def _fraction(text: str) -> float:
    above, _, below = str(text).partition("/")
    return float(above) / float(below or 1)
