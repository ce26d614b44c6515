"""The progress display of a run: a live table on a terminal, otherwise one line per step."""

import contextlib
import sys
from collections import deque
from collections.abc import Mapping
from datetime import datetime, timedelta
from itertools import zip_longest
from statistics import median

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats.events import Event, Failed
from megatron_blackmamba.formats.step_records import StepRecord
from megatron_blackmamba.training.metrics import Metric, all_metrics
from megatron_blackmamba.training.record.logger import Logger
from megatron_blackmamba.training.record.output import Output

STEPS_FOR_ETA = 50
STEPS_TO_WARM_UP = 1
"""First steps of a process that do not count for the ETA: they load libraries and use memory for the first time."""


def step_line(record: StepRecord) -> str:
    """Return one step as one plain line: every metric that asks for it."""
    texts = (_text(metric, metric.of(record.scalars)) for metric in all_metrics() if metric.in_line)
    return "  ".join(filter(None, [f"step {record.step}", *texts]))


class Display(Logger):
    """Live progress on a terminal, or the lines of log.txt without one."""

    def __init__(self, config: RunConfig, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stdout)
        self._output = Output(self.console.file)
        self._config = config
        self._seconds: deque[float] = deque(maxlen=STEPS_FOR_ETA)
        self._taken = 0
        self._last: dict[str, float] = {}
        self._live: Live | None = None
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TaskProgressColumn(),
                TextColumn("ETA {task.fields[eta]}"),
                console=self.console,
                expand=True,
            )
            self._task = self._bar.add_task(config.name, total=config.last_step(0, 0), eta="–")

    def step(self, record: StepRecord) -> None:
        self._last |= record.scalars
        self._taken += 1
        if self._taken > STEPS_TO_WARM_UP:
            self._seconds.append(record.scalars["speed/step_seconds"])
        last = self._config.last_step(record.step, int(record.scalars["consumed_samples"]))
        if not self.console.is_terminal:
            self._output.write(f"{step_line(record)}  ETA {self._eta(record.step, last)}")
            return
        self._bar.update(self._task, completed=record.step, total=last, eta=self._eta(record.step, last))
        self._show(Panel(Group(self._bar, self._table()), border_style="dim"))

    def event(self, event: Event, time: datetime) -> None:
        """Show an event. The error that ends a run is printed by the process itself."""
        if isinstance(event, Failed):
            return
        if not self.console.is_terminal:
            self._output.write(event.sentence)
            return
        with contextlib.suppress(OSError):  # the terminal may be gone: log.txt keeps the line
            self.console.print(event.sentence, markup=False, highlight=False, soft_wrap=True)

    def rewind(self, step: int) -> None:
        self._seconds.clear()

    def close(self) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError):  # the terminal may be gone
                self._live.stop()
            self._live = None

    def _show(self, panel: Panel) -> None:
        if self._live is None:
            self._live = Live(panel, console=self.console, refresh_per_second=4)
            with contextlib.suppress(OSError):
                self._live.start()
        self._live.update(panel)

    def _eta(self, step: int, last: int) -> str:
        if not self._seconds:
            return "–"
        left = max(0, last - step) * median(self._seconds)
        return str(timedelta(seconds=round(left)))

    def _table(self) -> Table:
        """Return a table of the latest values; a metric with several keys gets one row per metric."""
        shown = [(metric, metric.of(self._last)) for metric in all_metrics() if metric.in_line or metric.in_table]
        single = [(metric.title, metric.text(values[""])) for metric, values in shown if values and not metric.many]
        cells = [cell for cell in single if cell[1]]
        table, lines = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
        for left, right in zip_longest(cells[::2], cells[1::2], fillvalue=("", "")):
            table.add_row(*left, *right)
        for metric, values in shown:
            if values and metric.many:
                lines.add_row(metric.title, _by_key(metric, values))
        both = Table.grid()
        both.add_row(table)
        both.add_row(lines)
        return both


def _text(metric: Metric, values: Mapping[str, float]) -> str:
    """Return label and values of a metric; nothing if the step has none."""
    text = _by_key(metric, values) if metric.many else "".join(map(metric.text, values.values()))
    return f"{metric.label} {text}".strip() if text else ""


def _by_key(metric: Metric, values: Mapping[str, float]) -> str:
    return "  ".join(f"{key} {metric.text(value)}" for key, value in values.items())
