"""`blackmamba runs`: every run in a folder with its state, in a table."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from megatron_blackmamba.config import ConfigError, read_saved
from megatron_blackmamba.formats import step_records
from megatron_blackmamba.formats.branches import trunk_of
from megatron_blackmamba.formats.evaluations import read_run
from megatron_blackmamba.formats.run_folder import RunFolder, near
from megatron_blackmamba.report.charts import short
from megatron_blackmamba.report.history import ReportError
from megatron_blackmamba.report.state import TAIL, Queue, state_of

SIGNS = ("config.yaml", "metrics.jsonl", "launch/*/job.sbatch", "logs/running_job")
"""Files of which every run's folder has one."""
TEXTS = ("run", "state")
"""Columns of words, which every table has; the others have numbers."""
WIDE = 1000
GAP = 1
"""Spaces between columns."""
DROPPED_FIRST = ("scores", "tokens", "validation", "tokens/s", "loss", "to go", "step")
"""Columns that a table leaves out, in this order, until it fits the terminal."""


@dataclass(frozen=True)
class Overview:
    """A run in one line."""

    name: str
    state: str
    """launched, not started, training, finished, requeue (its job goes on), stopped, gave up or failed."""
    step: int | None = None
    steps: int | None = None
    tokens: int | None = None
    loss: float | None = None
    validation: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    evaluations: int = 0
    problem: str | None = None
    """What is wrong with the run, in words."""
    trunk: str | None = None
    """The run that it branches from, by its name in this list, or by its folder if it is not in it."""
    branched_at: int | None = None
    """The step of the trunk after which it begins."""
    depth: int = 0
    """Number of runs in this list that it branches from, one from the other."""


def overviews(folder: Path) -> list[Overview]:
    """Return the runs in a folder, or the one that it is."""
    if not folder.is_dir():
        raise ReportError(
            f"{folder.absolute()}: no such folder{near(folder)} Name a folder of runs, or change to its parent"
        )
    queue = Queue()
    if _is_run(folder):
        run = _overview(RunFolder(folder), folder.resolve().name, queue)
        trunk = trunk_of(RunFolder(folder))
        return [replace(run, trunk=str(trunk.run.root), branched_at=trunk.step) if trunk else run]
    roots = []
    for inside in sorted(folder.iterdir()):
        nested = {inside / path.relative_to(inside).parts[0] for sign in SIGNS for path in inside.glob(f"*/{sign}")}
        roots += [inside] if _is_run(inside) else sorted(filter(_is_run, nested))  # as the quickstart's run
    return list(_as_tree([_overview(RunFolder(root), str(root.relative_to(folder)), queue) for root in roots], folder))


def _as_tree(found: list[Overview], folder: Path) -> Iterator[Overview]:
    """Yield the runs with each one's branches after it, those that begin first first."""
    trunks = {one.name: trunk_of(RunFolder(folder / one.name)) for one in found}
    name_of = {(folder / one.name).resolve(): one.name for one in found}
    listed = {name: trunk and name_of.get(trunk.run.root.resolve()) for name, trunk in trunks.items()}
    shown: set[str] = set()

    def below(one: Overview, depth: int) -> Iterator[Overview]:
        shown.add(one.name)
        trunk = trunks[one.name]
        one = replace(one, depth=depth)
        if trunk:
            one = replace(one, trunk=listed[one.name] or str(trunk.run.root), branched_at=trunk.step)
        yield one
        branches = [other for other in found if listed[other.name] == one.name and other.name not in shown]
        for branch in sorted(branches, key=lambda other: (trunks[other.name] or trunk).step):  # type: ignore[union-attr]
            yield from below(branch, depth + 1)

    for one in found:
        if not listed[one.name]:
            yield from below(one, 0)
    for one in found:  # a circle, which copied folders could make
        if one.name not in shown:
            yield from below(one, 0)


def _is_run(folder: Path) -> bool:
    """Return whether a folder is a run's; saved weights have a config too, and a manifest."""
    return not (folder / "manifest.json").exists() and any(next(folder.glob(sign), None) for sign in SIGNS)


def _overview(run: RunFolder, name: str, queue: Queue) -> Overview:
    records = list(step_records.metrics_so_far(run.metrics, TAIL))
    evaluations = len(read_run(run.root))
    last = records[-1] if records else {}
    seconds = float(last.get("speed/step_seconds") or 0.0)
    state = state_of(run, seconds, queue)
    if not records:
        return Overview(name, state.name, evaluations=evaluations, problem=state.problem)
    left = _steps_left(run, last)
    return Overview(
        name=name,
        state=state.name,
        step=last["step"],
        steps=last["step"] + left if left is not None else None,
        tokens=last.get("consumed_tokens"),
        loss=last.get("loss"),
        validation=step_records.last_value(records, "validation/loss"),
        tokens_per_second=last.get("speed/tokens_per_second"),
        seconds_left=left * seconds if left and state.name == "training" else None,
        evaluations=evaluations,
        problem=state.problem,
    )


def _steps_left(run: RunFolder, last: dict[str, Any]) -> int | None:
    try:
        config = read_saved(run.config, known_kinds=False)
    except ConfigError:
        return None
    return config.steps_left(last.get("consumed_samples", 0))


def console() -> Console:
    """Return where to print the table: a file gets all columns unless COLUMNS says how many characters fit a line."""
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=WIDE)


def show(found: list[Overview], console: Console) -> None:
    """Print the table. If it is too wide for the terminal, leave out columns; names and numbers are never cut."""
    rows = [_cells(one) for one in found]
    columns = [[header, *(row[header] for row in rows)] for header in rows[0]]
    for header in DROPPED_FIRST:
        if sum(max(map(cell_len, column)) + GAP for column in columns) - GAP <= console.width:
            break
        columns = [column for column in columns if column[0] != header]
    for number, row in enumerate(zip(*map(_aligned, columns), strict=True)):
        line = (" " * GAP).join(row).rstrip()
        console.print(Text(line, style="dim" if number == 0 else ""), soft_wrap=True)
    for one in found:
        if one.problem:
            console.print(Text(f"{one.name}: {one.problem}"), soft_wrap=True)


def _cells(one: Overview) -> dict[str, str]:
    """Return the cells of a run by their columns."""
    step = "–" if one.step is None else f"{one.step:,}" + (f" of {one.steps:,}" if one.steps else "")
    return {
        "run": f"{'  ' * (one.depth - 1)}└ {one.name}" if one.depth else one.name,
        "state": one.state,
        "step": step,
        "tokens": _short(one.tokens),
        "loss": _loss(one.loss),
        "validation": _loss(one.validation),
        "tokens/s": _short(one.tokens_per_second),
        "to go": "–" if one.seconds_left is None else str(timedelta(seconds=round(one.seconds_left))),
        "scores": str(one.evaluations),
    }


def _aligned(column: list[str]) -> list[str]:
    """Pad the cells of a column: texts on the right, numbers on the left."""
    width = max(map(cell_len, column))
    padding = (" " * (width - cell_len(cell)) for cell in column)
    left = column[0] in TEXTS
    return [cell + pad if left else pad + cell for cell, pad in zip(column, padding, strict=True)]


def to_json(found: list[Overview]) -> str:
    """Return the runs as one JSON object."""
    return json.dumps({"runs": [asdict(one) for one in found]}, ensure_ascii=False)


def _short(value: float | None) -> str:
    return "–" if value is None else short(value)


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
