"""The progress of the work: one bar on a terminal, periodic lines in a log file."""

import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

LOG_EVERY_SECONDS = 30.0


class Count(NamedTuple):
    """Sums over all shards so far."""

    input_bytes: int
    tokens: int
    documents: int


class Progress:
    """A progress display on standard error; a thread polls `count` while the block runs."""

    def __init__(self, total_bytes: int, count: Callable[[], Count], *, quiet: bool = False) -> None:
        self._total, self._count, self._quiet = total_bytes, count, quiet
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> "Progress":
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if not self._quiet:
            self._thread.join()

    def _show(self) -> None:
        if sys.stderr.isatty():
            self._bar()
        else:
            self._lines()

    def _bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            SpinnerColumn(),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        start = time.monotonic()
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("reading", total=self._total or None)
            while True:
                over = self._over.wait(0.2)
                count = self._count()
                bar.update(task, completed=count.input_bytes, description=_rate(count, time.monotonic() - start))
                if over:
                    return

    def _lines(self) -> None:
        start = time.monotonic()
        while not self._over.wait(LOG_EVERY_SECONDS):
            count, seconds = self._count(), time.monotonic() - start
            done = count.input_bytes / self._total if self._total else 0.0
            percent = f"{100 * done:5.1f}%  " if self._total else ""  # standard input has no known end
            left = f", {_clock(seconds / done - seconds)} left" if done > 0 else ""
            print(f"{percent}{_rate(count, seconds)}{left}", file=sys.stderr, flush=True)


def _rate(count: Count, seconds: float) -> str:
    return f"{short(count.tokens)} tokens, {short(count.tokens / max(seconds, 1e-9))} tokens/s"


def counted(number: int, what: str) -> str:
    """Return a number with its noun: 1 shard, 2 shards."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def short(number: float) -> str:
    """Format a count: 1234567 as 1.23M."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 1000:
            return f"{number:.3g}{unit}" if unit else f"{number:.0f}"
        number /= 1000
    return f"{number:.4g}T"


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"
