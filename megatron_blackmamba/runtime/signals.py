"""Stop requests by signal, and a watchdog that ends a process that hangs."""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_blackmamba.runtime import hangs
from megatron_blackmamba.runtime.exits import HUNG

ASKS_TO_STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Sent by `kill`, by a job script, and when the terminal closes."""


def hold() -> None:
    """Block the signals that ask a run to stop. They stay pending until the training loop or the launcher listens."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKS_TO_STOP)


def heeded(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Leave out SIGHUP if this process was started with nohup."""
    return [each for each in numbers if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]


class StopRequest:
    """A remembered signal. The other ranks learn of it from the next step's loss all-reduce.

    A second Ctrl-C ends the process at once. The other signals may repeat: a job script sends its request until the
    run stops.

    catch: the signals to heed from now on; `heed` adds others later.
    """

    def __init__(self, catch: tuple[signal.Signals, ...] = ASKS_TO_STOP) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self.heed(*catch)

    def heed(self, *numbers: signal.Signals) -> None:
        """Remember these signals too, and let in those that were held."""
        self._before |= {number: signal.signal(number, self._on_signal) for number in heeded(numbers)}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received == number == signal.SIGINT:
            self.release()
            os.kill(os.getpid(), number)
        self.received = signal.Signals(number)

    @property
    def asked(self) -> bool:
        """Return whether this rank was asked to stop."""
        return self.received is not None

    def release(self) -> None:
        """Restore the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


class Watchdog:
    """Ends the process with 70 and a report if `seconds` pass without a sign of life.

    logs: the run's log folder, where every rank leaves heartbeats and, after a hang, its report; None leaves none.
    """

    def __init__(self, seconds: float, rank: int = 0, size: int = 1, logs: Path | None = None) -> None:
        self.seconds, self.rank = seconds, rank
        self._what, self._since = "starting", time.monotonic()
        self._done = threading.Event()
        self._beats = None if logs is None else hangs.Heartbeats(logs, rank, size, seconds)
        self._called = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        if self._beats and size > 1:
            threading.Thread(target=self._beat, args=(self._beats,), name="heartbeat", daemon=True).start()

    def alive(self, what: str) -> None:
        """Call at every step and before anything long; `what` names it, should it hang."""
        self._what, self._since = what, time.monotonic()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def _silent(self) -> float:
        return time.monotonic() - self._since

    def _watch(self) -> None:
        """End the process if it makes no progress; if a thread holds the GIL, faulthandler ends it instead."""
        after = self.seconds + hangs.patience(self.seconds) + 1
        while not self._done.wait(min(1.0, self.seconds / 4)):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # no standard error to write to
                faulthandler.dump_traceback_later(after, exit=True, file=sys.__stderr__ or sys.stderr)
            if self._called or self._silent > self.seconds:
                self._end(self._silent)
        faulthandler.cancel_dump_traceback_later()

    def _beat(self, beats: hangs.Heartbeats) -> None:
        """Write heartbeats, in a thread of its own: the disk may hang as well."""
        while not self._done.is_set():
            with contextlib.suppress(OSError):  # a full disk; the next beat may get through
                beats.write(self._what, self._silent)
                self._called = self._called or beats.another_hangs()
            self._done.wait(beats.every)

    def _end(self, silent: float) -> None:
        first = "another rank reached" if self._called else "longer than"
        moved = f"nothing moved for {silent:.0f} s in {self._what!r}"
        headline = f"rank {self.rank} hangs: {moved}; {first} training.guard.hang_seconds"
        print(f"{headline}. The stacks of its threads:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        sys.stderr.flush()
        if self._beats:
            arguments = (self._beats, headline, self._what, silent)
            report = threading.Thread(target=hangs.write_report, args=arguments, name="report", daemon=True)
            report.start()
            report.join(hangs.patience(self.seconds))  # not for ever: the disk may be what hangs
        os._exit(HUNG)
