"""`blackmamba runs`: every run in a folder with its state, in a table."""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_blackmamba.config import ConfigError, read_saved
from megatron_blackmamba.formats import events, step_records
from megatron_blackmamba.formats.evaluations import read_run
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.report.charts import short
from megatron_blackmamba.report.history import ReportError, launched
from megatron_blackmamba.training.lock import is_held

TAIL = 1 << 18
"""Bytes at the end of metrics.jsonl, or events.jsonl, in which the last records lie."""
SILENT_STEPS = 20
"""A run of which only the age of its last record is known is not training after the time of this many steps."""
SILENT_SECONDS = 120.0
SIGNS = ("config.yaml", "metrics.jsonl", "launch/*/job.sbatch")
"""Files of which every run's folder has one."""
STARTS = (events.Started.kind, events.Resumed.kind)
ENDS = {
    events.Done.kind: "finished",
    events.Stopped.kind: "stopped",
    events.GaveUp.kind: "gave up",
    events.Failed.kind: "failed",
}


@dataclass(frozen=True)
class Overview:
    """A run in one line."""

    name: str
    state: str
    """launched, not started, training, finished, requeue (saved, start it again), stopped, gave up or failed."""
    step: int | None = None
    steps: int | None = None
    tokens: int | None = None
    loss: float | None = None
    validation: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    evaluations: int = 0


def overviews(folder: Path) -> list[Overview]:
    """Return the runs in a folder, or the one that it is."""
    if not folder.is_dir():
        raise ReportError(f"{folder}: no such folder. Name a folder of runs, such as runs")
    if _is_run(folder):
        return [_overview(RunFolder(folder), folder.resolve().name)]
    roots = []
    for inside in sorted(folder.iterdir()):
        nested = {inside / path.relative_to(inside).parts[0] for sign in SIGNS for path in inside.glob(f"*/{sign}")}
        roots += [inside] if _is_run(inside) else sorted(filter(_is_run, nested))  # as the quickstart's run
    return [_overview(RunFolder(root), str(root.relative_to(folder))) for root in roots]


def _is_run(folder: Path) -> bool:
    """Return whether a folder is a run's; saved weights have a config too, and a manifest."""
    return not (folder / "manifest.json").exists() and any(next(folder.glob(sign), None) for sign in SIGNS)


def _overview(run: RunFolder, name: str) -> Overview:
    records = list(_last_records(run.metrics, step_records.parse_line))
    evaluations = len(read_run(run.root))
    last = records[-1] if records else {}
    seconds = float(last.get("speed/step_seconds") or 0.0)
    state = _state(run, seconds)
    if not records:
        return Overview(name, state, evaluations=evaluations)
    left = _steps_left(run, last)
    return Overview(
        name=name,
        state=state,
        step=last["step"],
        steps=last["step"] + left if left is not None else None,
        tokens=last.get("consumed_tokens"),
        loss=last.get("loss"),
        validation=step_records.last_value(records, "validation/loss"),
        tokens_per_second=last.get("speed/tokens_per_second"),
        seconds_left=left * seconds if left and state == "training" else None,
        evaluations=evaluations,
    )


def _state(run: RunFolder, step_seconds: float) -> str:
    """Return the state by the run's lock, marker and events; a killed run leaves none of them."""
    if run.done.exists():
        return "finished"
    held = is_held(run.lock)
    if held:
        return "training"
    if run.requeue.exists():
        return "requeue"
    if launched(run) and not run.metrics.exists():
        return "launched"
    kinds = [event["kind"] for event in _last_records(run.events, events.parse_line)]
    last = next((kind for kind in reversed(kinds) if kind in STARTS or kind in ENDS), None)
    if last in ENDS:
        return ENDS[last]
    if not run.metrics.exists():
        return "not started" if last is None else "stopped" if held is False else "training"
    silent = time.time() - run.metrics.stat().st_mtime
    return "training" if held is None and silent < max(SILENT_SECONDS, SILENT_STEPS * step_seconds) else "stopped"


def _steps_left(run: RunFolder, last: dict[str, Any]) -> int | None:
    try:
        config = read_saved(run.config)
    except ConfigError:
        return None
    return config.steps_left(last.get("consumed_samples", 0))


def _last_records(path: Path, parse: Callable[[bytes], dict[str, Any] | None]) -> Iterator[dict[str, Any]]:
    """Yield the last records of a file of metrics or events, without reading all of a long one."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL))
        for line in file.read().splitlines(keepends=True):
            record = parse(line)
            if record is not None:
                yield record


def show(found: list[Overview], console: Console) -> None:
    """Print the table; it fits a terminal of 80 columns."""
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="dim")
    for number, header in enumerate(
        ["run", "state", "step", "tokens", "loss", "validation", "tokens/s", "to go", "scores"]
    ):
        table.add_column(header, justify="left" if number < 2 else "right", no_wrap=number > 0, overflow="fold")
    for one in found:
        step = "–" if one.step is None else f"{one.step:,}" + (f" of {one.steps:,}" if one.steps else "")
        left = "–" if one.seconds_left is None else str(timedelta(seconds=round(one.seconds_left)))
        table.add_row(
            one.name,
            one.state,
            step,
            _short(one.tokens),
            _loss(one.loss),
            _loss(one.validation),
            _short(one.tokens_per_second),
            left,
            str(one.evaluations),
        )
    console.print(table)


def to_json(found: list[Overview]) -> str:
    """Return the runs as one JSON object."""
    return json.dumps({"runs": [asdict(one) for one in found]}, ensure_ascii=False)


def _short(value: float | None) -> str:
    return "–" if value is None else short(value)


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
