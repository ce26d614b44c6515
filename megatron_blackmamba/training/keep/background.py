"""Commands beside training: one at a time, each in a process that yields to the steps and ends with the run.

Steps that wait for nothing can starve them on a busy machine, so none of them yields once the last step is taken.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Any

APART: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
"""Ctrl-C ends a run after its step, and this process with it. A session of its own would compete with the run's."""

LOWEST_PRIORITY = 19
LAST_BYTES = 4096


class Background:
    """The steps that wait for their command, and the process that works on the first of them.

    A subclass says what the `command` of a step is, and what to do when it has `ended`.
    """

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._yields = True
        self._said: IO[bytes]  # a file: a pipe would fill during a long command, which then never ends

    def command(self, step: int) -> Sequence[str]:
        """Return the words of `blackmamba` for a step."""
        raise NotImplementedError

    def ended(self, step: int, problem: str | None) -> None:
        """Handle the end of a step's command; `problem` is the last line of one that failed."""
        raise NotImplementedError

    def add(self, step: int) -> None:
        """Run the command of a step as soon as the earlier ones have ended."""
        self.waiting.append(step)
        self.poll()

    @property
    def busy(self) -> bool:
        """Return whether a command runs or waits."""
        self.poll()
        return self._process is not None

    def hurry(self) -> None:
        """Let commands have the priority of the run itself from now on, as no further step waits for a processor.

        A command that runs already can be raised by root alone.
        """
        self._yields = False
        self._set_priority(os.getpriority(os.PRIO_PROCESS, 0))

    def poll(self) -> None:
        """Handle the end of a command, and begin the next; waits for nothing."""
        if self._process is not None and self._process.poll() is not None:
            self._finish()
        while self._process is None and self.waiting:
            try:
                self._begin(self.waiting[0])
            except OSError as error:  # no more processes or memory, or no room for what it says
                self.ended(self.waiting.pop(0), f"its process could not be started: {error}")

    def _begin(self, step: int) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        launcher = [sys.executable, "-m", "megatron_blackmamba.runtime.parent", str(os.getpid())]
        self._process = subprocess.Popen(
            [*launcher, sys.executable, "-m", "megatron_blackmamba", *self.command(step)],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            **APART,
        )
        if self._yields:
            self._set_priority(LOWEST_PRIORITY)

    def _set_priority(self, priority: int) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):  # it has ended, or may not be raised
                os.setpriority(os.PRIO_PGRP, self._process.pid, priority)  # all its threads

    def stop(self) -> None:
        """End the command that runs, and drop the others."""
        self.waiting.clear()
        if self._process is not None:
            self._process.kill()
            self._result()

    def _finish(self) -> None:
        step, (code, line) = self.waiting.pop(0), self._result()
        self.ended(step, line.removeprefix("blackmamba: ") if code else None)

    def _result(self) -> tuple[int, str]:
        """Return the exit code of the command, and the last line that it printed."""
        assert self._process is not None
        code, self._process = self._process.wait(), None
        with self._said as said:
            said.seek(-min(said.seek(0, os.SEEK_END), LAST_BYTES), os.SEEK_END)
            lines = said.read().decode(errors="replace").strip().splitlines()
        return code, lines[-1] if lines else f"its process ended with code {code}"
