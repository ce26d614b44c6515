"""Being asked to stop, and noticing that nothing moves: two signals set a flag, a watchdog ends what hangs."""

import faulthandler
import os
import signal
import sys
import threading
import time
from types import FrameType

ASKS_TO_STOP = (signal.SIGTERM, signal.SIGUSR1)
HUNG = 70
"""Exit code of a process that its watchdog ended."""


class StopRequest:
    """Remembers a signal. That one rank got it, the others learn with the losses of the next step.

    A second Ctrl-C ends the process as if none had been caught. The other signals may come again and again: a job
    script repeats its request until it is heard.
    """

    def __init__(self, catch: tuple[signal.Signals, ...] = ASKS_TO_STOP) -> None:
        self.received: signal.Signals | None = None
        self._before = {number: signal.signal(number, self._on_signal) for number in catch}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received == number == signal.SIGINT:
            self.release()
            os.kill(os.getpid(), number)
        self.received = signal.Signals(number)

    @property
    def asked(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.received is not None

    def release(self) -> None:
        """Give the signals back to whom they belonged."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


class Watchdog:
    """Ends the process with every thread's stack if `seconds` pass without a sign of life."""

    def __init__(self, seconds: float, rank: int = 0) -> None:
        self.seconds, self.rank = seconds, rank
        self._what, self._since = "starting", time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

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

    def _watch(self) -> None:
        while not self._done.wait(min(1.0, self.seconds / 4)):
            silent = time.monotonic() - self._since
            if silent > self.seconds:
                self._end(silent)

    def _end(self, silent: float) -> None:
        print(
            f"rank {self.rank} hangs: nothing moved for {silent:.0f} s in {self._what!r}"
            " (training.guard.hang_seconds). The stacks of its threads:",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        sys.stderr.flush()
        os._exit(HUNG)
