"""What a person sees while a run goes: a live table on a terminal, one line a step otherwise."""

import contextlib
import sys
from collections import deque
from datetime import datetime, timedelta
from statistics import median

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats.events import Event
from megatron_blackmamba.training.metrics import StepMetrics

STEPS_FOR_ETA = 50


def step_line(metrics: StepMetrics) -> str:
    """One step as one plain line."""
    parts = [
        f"step {metrics.step}",
        f"loss {_number(metrics.loss, '.4f')}",
        f"lr {metrics.learning_rate:.3e}",
        f"gradient norm {_number(metrics.grad_norm, '.3f')}",
        f"{metrics.tokens_per_second:,.0f} tokens/s",
        f"{metrics.step_seconds:.3f} s",
    ]
    if metrics.mfu is not None:
        parts.append(f"MFU {metrics.mfu:.1%}")
    if metrics.skipped:
        parts.append("skipped")
    if metrics.validation_loss:
        parts.append("validation " + _by_source(metrics.validation_loss, ".4f"))
    return "  ".join(parts)


class Display:
    """Live progress where there is a terminal; the lines of log.txt where there is none."""

    def __init__(self, config: RunConfig, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stdout)
        self._config = config
        self._seconds: deque[float] = deque(maxlen=STEPS_FOR_ETA)
        self._validation: dict[str, float] | None = None
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

    def step(self, metrics: StepMetrics) -> None:
        self._seconds.append(metrics.step_seconds)
        self._validation = metrics.validation_loss or self._validation
        last = self._config.last_step(metrics.step, metrics.consumed_samples)
        if not self.console.is_terminal:
            with contextlib.suppress(OSError):  # as below; laying out a plain line would take longer than the rest
                print(step_line(metrics), f" ETA {self._eta(metrics, last)}", file=self.console.file, flush=True)
            return
        self._bar.update(self._task, completed=metrics.step, total=last, eta=self._eta(metrics, last))
        self._show(Panel(Group(self._bar, self._table(metrics)), border_style="dim"))

    def event(self, event: Event, time: datetime) -> None:
        with contextlib.suppress(OSError):  # standard output may lie on a full disk: log.txt keeps the line
            self.console.print(event.sentence, markup=False, highlight=False, soft_wrap=True)

    def rewind(self, step: int) -> None:
        self._seconds.clear()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, panel: Panel) -> None:
        if self._live is None:
            self._live = Live(panel, console=self.console, refresh_per_second=4)
            self._live.start()
        self._live.update(panel)

    def _eta(self, metrics: StepMetrics, last: int) -> str:
        left = max(0, last - metrics.step) * median(self._seconds)
        return str(timedelta(seconds=round(left)))

    def _table(self, metrics: StepMetrics) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row("loss", _number(metrics.loss, ".4f"), "tokens/s", f"{metrics.tokens_per_second:,.0f}")
        table.add_row(
            "gradient norm", _number(metrics.grad_norm, ".3f"), "seconds a step", f"{metrics.step_seconds:.3f}"
        )
        table.add_row(
            "learning rate", f"{metrics.learning_rate:.3e}", "memory", f"{metrics.memory_bytes / 2**30:.2f} GiB"
        )
        if metrics.mfu is not None:
            table.add_row("", "", "MFU", f"{metrics.mfu:.1%}")
        read = sum(metrics.source_samples.values()) or 1
        shares = {source: 100 * count / read for source, count in metrics.source_samples.items()}
        rows = [("mixture, %", shares, ".1f"), ("loss by source", metrics.source_loss, ".3f")]
        if self._validation:
            rows.append(("validation", self._validation, ".3f"))
        lines = Table.grid(padding=(0, 2))
        for name, values, form in rows:
            lines.add_row(name, _by_source(values, form))
        both = Table.grid()
        both.add_row(table)
        both.add_row(lines)
        return both


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _by_source(values: dict[str, float], form: str) -> str:
    return "  ".join(f"{source} {value:{form}}" for source, value in values.items())
