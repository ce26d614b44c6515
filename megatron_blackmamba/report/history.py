"""A run as its files tell it: what was measured at every step, what was planned, where it was interrupted."""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_blackmamba.config import read_saved
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.training.metrics import read_metrics

SAMPLES = "samples.json"
STEPWISE = ("loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu")
RESUMED = re.compile(r"resumes after step (\d+)")
REWOUND = re.compile(r"rewound to step (\d+)(?!\d| \d+ times)")


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
    """Notes of steps that were not skipped: spikes, devices that failed, slow ranks."""
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
    log = folder.log.read_text(encoding="utf-8", errors="replace") if folder.log.is_file() else ""
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
        skipped=[(r["step"], r.get("note") or "not applied") for r in records if r.get("skipped")],
        remarks=[
            (r["step"], r["note"])
            for r in records
            if r.get("note") and not r.get("skipped") and not REWOUND.match(r["note"])
        ],
        restarts=[int(step) for step in RESUMED.findall(log)],
        rewinds=[int(step) for step in REWOUND.findall(log)],
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


def _column(values: Any) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], dtype=float)


def _fraction(text: str) -> float:
    above, _, below = str(text).partition("/")
    return float(above) / float(below or 1)
