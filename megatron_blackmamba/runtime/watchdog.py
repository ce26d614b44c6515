"""A watchdog that ends a process that hangs."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

from megatron_blackmamba.runtime import hangs
from megatron_blackmamba.runtime.deadman import Deadman
from megatron_blackmamba.runtime.exits import HUNG


class Watchdog:
    """Ends the process with 70 and a report if `seconds` pass without a sign of life.

    logs: the run's log folder, where every rank leaves heartbeats and, after a hang, its report; None leaves none.
    """

    def __init__(self, seconds: float, rank: int = 0, size: int = 1, logs: Path | None = None) -> None:
        self.seconds, self.rank = seconds, rank
        self._what, self._awake, self._since = "starting", 0.0, 0.0
        self._done, self._begun = threading.Event(), threading.Event()
        self._beats = None if logs is None else hangs.Heartbeats(logs, rank, size, seconds)
        self._called = False
        self._deadman = Deadman(seconds + hangs.patience(seconds) + 1)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        if self._beats and size > 1:
            threading.Thread(target=self._beat, args=(self._beats,), name="heartbeat", daemon=True).start()

    def alive(self, what: str) -> None:
        """Call at every step, and before and during anything long; `what` names it, should it hang."""
        self._what, self._since = what, self._awake

    def begin(self) -> None:
        """Write the first heartbeat now: the run is not refused. Without this call it comes a little later."""
        self._begun.set()

    def stop(self) -> None:
        self._done.set()
        self._begun.set()
        self._thread.join()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def _silent(self) -> float:
        """Return the seconds since the last sign of life in which this process ran."""
        return self._awake - self._since

    def _watch(self) -> None:
        """End the process if it makes no progress. Time in which this thread did not run does not count.

        The process was stopped, its job suspended or the machine asleep; if another thread has Python's lock, the
        deadman ends the process instead.
        """
        tick, last = min(1.0, self.seconds / 4), time.monotonic()
        while not self._done.wait(tick):
            now = time.monotonic()
            self._awake += min(now - last, 2 * tick)
            last = now
            self._deadman.beat()
            if self._called or self._silent > self.seconds:
                self._end(self._silent)
        self._deadman.release()

    def _beat(self, beats: hangs.Heartbeats) -> None:
        """Write heartbeats, in a thread of its own: the disk may hang as well. A run refused at once leaves none."""
        self._begun.wait(beats.every)
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
