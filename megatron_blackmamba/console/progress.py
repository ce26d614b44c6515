"""The progress of a command, on standard error: a display on a terminal, a line at times in a file."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

LOG_EVERY_SECONDS = 30.0
POLL_SECONDS = 0.25
SHOWN_AFTER_SECONDS = 1.0
"""A command that is quicker shows nothing."""


class State(NamedTuple):
    """The state of some work."""

    done: float
    """Part that is done, between 0 and 1; 0 if that is not known."""
    text: str


class Progress:
    """A display that polls `state` in a thread while the block runs.

    table: what to draw on a terminal in place of a bar, as rich renders it.
    every: seconds between lines in a file; by default LOG_EVERY_SECONDS.
    """

    def __init__(
        self,
        state: Callable[[], State],
        *,
        table: Callable[[], Any] | None = None,
        every: float | None = None,
        quiet: bool = False,
    ) -> None:
        self._state, self._table, self._quiet = state, table, quiet
        self._every = LOG_EVERY_SECONDS if every is None else every
        self._base: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def __enter__(self) -> "Progress":
        self._begun = self._base_time = time.monotonic()
        self._base, self._last = None, 0.0
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if not self._quiet:
            self._thread.join()

    def _show(self) -> None:
        if not sys.stderr.isatty():
            self._lines()
        elif not self._over.wait(SHOWN_AFTER_SECONDS):
            self._display()

    def _lines(self) -> None:
        printed = time.monotonic()
        while not self._over.wait(min(POLL_SECONDS, self._every)):
            line = self._line()
            if time.monotonic() - printed >= self._every:
                printed = time.monotonic()
                print(line, file=sys.stderr, flush=True)

    def _display(self) -> None:
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(stderr=True), transient=True, auto_refresh=False, redirect_stdout=False) as live:
            while True:
                live.update(self._table() if self._table else self._bar(), refresh=True)
                if self._over.wait(POLL_SECONDS):
                    return

    def _bar(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        row = Table.grid(padding=(0, 1))
        line = Text(self._line(), no_wrap=True, overflow="ellipsis")
        row.add_row(ProgressBar(completed=self._last, total=1.0, width=24, pulse=not self._last), line)
        return row

    def _line(self) -> str:
        done, text = self._state()
        now = time.monotonic()
        if self._base is None or done < self._last:  # what an earlier call did, or the next part of the work
            self._base, self._base_time = done, now
        self._last = done
        if not done:
            return f"{text}, {clock(now - self._begun)}"
        gained = done - self._base
        left = f", {clock((1 - done) * (now - self._base_time) / gained)} left" if gained > 0 else ""
        return f"{100 * done:5.1f}%  {text}{left}"


def working(text: str, quiet: bool = False) -> Progress:
    """Show that something goes on of which no part is known, and for how long."""
    return Progress(lambda: State(0.0, text), quiet=quiet)


def clock(seconds: float) -> str:
    """Format a duration as hours, minutes and seconds."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"
