"""The runs of a study under way: a table on a terminal, a line a minute in a file."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.table import Table

from megatron_blackmamba.console.progress import Progress, State, clock
from megatron_blackmamba.formats.step_records import metrics_so_far
from megatron_blackmamba.study.afford import own_steps
from megatron_blackmamba.study.runs import Cell

LINE_SECONDS = 60.0
_TAIL_BYTES = 1 << 12


class Reached(NamedTuple):
    """The progress of one run."""

    name: str
    step: int
    steps: int
    loss: float | None
    seconds_left: float | None


def reached(cell: Cell) -> Reached:
    """Return the progress of a run, from the last line of its metrics."""
    own = cell.folder.metrics
    records = [*metrics_so_far(own if own.is_file() else cell.trunk_metrics, _TAIL_BYTES)]
    steps = cell.config.steps
    record = records[-1] if records else {}
    step, seconds = int(record.get("step", 0)), record.get("speed/step_seconds")
    return Reached(cell.name, step, steps, record.get("loss"), None if seconds is None else (steps - step) * seconds)


def show(cells: Sequence[Cell], running: Callable[[], Sequence[Cell]]) -> Progress:
    """Show which of the cells train now, their steps and the time left, and how many are done."""
    work = {cell.name: steps * cell.step_flops for cell, steps in own_steps(cells)}
    total, unfinished, seen = sum(work.values()), {cell.name: cell for cell in cells}, None

    def done(now: Sequence[Reached]) -> int:
        """Look only if other cells run than before: a study may have a thousand."""
        nonlocal seen
        if seen != (seen := [one.name for one in now]):
            for name in [name for name, cell in unfinished.items() if cell.done]:
                del unfinished[name]
        return len(cells) - len(unfinished)

    def state() -> State:
        now = [reached(cell) for cell in running()]
        finished = done(now)
        under_way = [one for one in now if one.name in unfinished]
        left = sum(work[name] for name in unfinished) - sum(work[one.name] * one.step / one.steps for one in under_way)
        runs = "".join(f"; {one.name} step {one.step} of {one.steps}, {_left(one)}" for one in now)
        return State(1 - left / total, f"{finished} of {len(cells)} runs done{runs}")

    def table() -> Table:
        drawn = Table("run", "step", "loss", "time left", box=None, pad_edge=False, header_style="dim")
        now = [reached(cell) for cell in running()]
        for one in now:
            loss = "–" if one.loss is None else f"{one.loss:.3f}"
            drawn.add_row(one.name, f"{one.step} of {one.steps}", loss, _left(one))
        drawn.caption = f"{done(now)} of {len(cells)} runs done"
        return drawn

    return Progress(state, table=table, every=LINE_SECONDS)


def _left(one: Reached) -> str:
    return "starting" if one.seconds_left is None else f"{clock(one.seconds_left)} left"
