"""`blackmamba evaluate`, as the command line has it."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from megatron_blackmamba.evaluation.evaluate import Options, evaluate
from megatron_blackmamba.evaluation.table import show
from megatron_blackmamba.formats.evaluations import Evaluation

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS_BETWEEN_LINES = 30.0
WIDTH = 160
"""Columns where the output goes to a file."""


def run(path: Path, options: Options, as_json: bool) -> Evaluation:
    """Score, show progress on standard error, and print the result."""
    with _progress() as told:
        found = evaluate(path, options, told)
    if as_json:
        print(json.dumps(summary(found), ensure_ascii=False))
    else:
        show(found, Console() if sys.stdout.isatty() else Console(width=WIDTH))
    return found


def summary(found: Evaluation) -> dict:
    """Return the result without the answers to single questions."""
    return {
        "model": found.model,
        "step": found.step,
        "tasks": {
            result.key.task: {
                "metrics": dict(result.metrics),
                "standard_errors": dict(result.errors),
                "questions": result.questions,
                "seconds": result.seconds,
                "data": {"file": result.data_file, "sha256": result.key.data},
                "task_version": result.key.task_version,
                "scorer": result.key.scorer,
                "precision": result.key.precision,
                "encoding": result.key.encoding,
                "limit": result.key.limit,
            }
            for result in found.results
        },
    }


class _progress:
    """A bar on a terminal; elsewhere, a line every half minute."""

    def __enter__(self) -> "Callable[[str, int, int], None]":
        self.bar: Progress | None = None
        self.rows: dict[str, TaskID] = {}
        self.begun: dict[str, tuple[float, int]] = {}
        self.last = time.monotonic()
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, console=Console(stderr=True), speed_estimate_period=600)
            self.bar.start()
        return self.told

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def told(self, task: str, done: int, total: int) -> None:
        """Show how many of a task's tokens are scored."""
        if self.bar:
            if task not in self.rows:
                self.rows[task] = self.bar.add_task(task, total=total)
            self.bar.update(self.rows[task], completed=done)
            return
        now = time.monotonic()
        since, first = self.begun.setdefault(task, (now, done))
        if now - self.last >= SECONDS_BETWEEN_LINES and done > first:
            self.last = now
            left = (total - done) * (now - since) / (done - first)
            line = f"blackmamba: {task}: {done / total:.0%} of {total:,} tokens, {left / 60:.0f} min left"
            print(line, file=sys.stderr, flush=True)
