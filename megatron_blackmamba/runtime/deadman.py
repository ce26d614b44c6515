"""End a process in which one thread keeps Python's lock: no other thread of it can.

A small process hears a beat every second. It counts the silence in seconds of its own and of the watched process, so
time in which either was stopped does not count. faulthandler's timer cannot do that: it would end a process that is
resumed. This file runs as a program too and imports nothing of the package.
"""

import contextlib
import faulthandler
import os
import select
import signal
import subprocess
import sys
import time

SHOW_STACKS = signal.SIGUSR2
"""What the process gets first: faulthandler prints its stacks without Python's lock."""
TICK_SECONDS = 1.0


class Deadman:
    """The process that listens; without one, as when no process can be started, nothing ends this one."""

    def __init__(self, seconds: float) -> None:
        self._pipe = None
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no standard error to write to
            faulthandler.register(SHOW_STACKS, file=sys.__stderr__ or sys.stderr, all_threads=True)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
            try:  # it inherits the mask: what asks the run to stop is not for it
                command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(seconds)]
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
                self._pipe = self._process.stdin
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def beat(self) -> None:
        """Say that Python's lock can be had."""
        if self._pipe:
            with contextlib.suppress(OSError):
                os.write(self._pipe.fileno(), b".")

    def release(self) -> None:
        """End the process that listens."""
        if self._pipe:
            self._process.kill()
            self._process.communicate()
            self._pipe = None


def _listen(process: int, seconds: float) -> None:
    silent = 0.0
    while os.getppid() == process:
        heard, _, _ = select.select([0], [], [], TICK_SECONDS)
        if heard:
            if not os.read(0, 4096):
                return
            silent = 0.0
        elif not _is_stopped(process):
            silent += TICK_SECONDS
        if silent > seconds:
            os.kill(process, SHOW_STACKS)
            time.sleep(TICK_SECONDS)
            os.kill(process, signal.SIGKILL)


def _is_stopped(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):  # no /proc, or just gone
        return False


if __name__ == "__main__":
    with contextlib.suppress(ProcessLookupError):
        _listen(int(sys.argv[1]), float(sys.argv[2]))
