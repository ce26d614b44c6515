"""Stop requests by signal."""

import os
import signal
from collections.abc import Iterable
from types import FrameType
from typing import Any

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
        around = getattr(self._before.get(self.received), "__self__", None)
        if isinstance(around, StopRequest):  # this run may end by itself now, and another follow
            around.received = self.received

    @property
    def asked(self) -> bool:
        """Return whether this rank was asked to stop."""
        return self.received is not None

    def release(self) -> None:
        """Restore the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
