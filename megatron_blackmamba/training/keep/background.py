"""Commands beside training: one at a time, in a process of low priority that ends with the run, however that ends."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

APART: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
"""Ctrl-C ends a run after its step, and this process with it. A session of its own would compete with the run's."""


class Background:
    """The steps that wait for their command, and the process that works on the first of them.

    A subclass says what the `command` of a step is, and what to do when it has `ended`.
    """

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self._process: subprocess.Popen[str] | None = None

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

    def poll(self) -> None:
        """Handle the end of a command, and begin the next; waits for nothing."""
        if self._process is not None and self._process.poll() is not None:
            self._finish()
        if self._process is None and self.waiting:
            launcher = [sys.executable, "-m", "megatron_blackmamba.runtime.parent", str(os.getpid())]
            self._process = subprocess.Popen(
                [*launcher, sys.executable, "-m", "megatron_blackmamba", *self.command(self.waiting[0])],
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                **APART,
            )

    def wait(self) -> None:
        """Finish all commands."""
        while self._process is not None:
            self._finish()
            self.poll()

    def stop(self) -> None:
        """End the command that runs, and drop the others."""
        self.waiting.clear()
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _finish(self) -> None:
        assert self._process is not None
        step = self.waiting.pop(0)
        _, errors = self._process.communicate()
        code, self._process = self._process.returncode, None
        lines = errors.strip().splitlines() or [f"its process ended with code {code}"]
        self.ended(step, lines[-1].removeprefix("blackmamba: ") if code else None)
