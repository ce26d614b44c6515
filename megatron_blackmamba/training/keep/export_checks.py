"""Check the exports of a run beside its training: `blackmamba verify` in a process of low priority, one at a time."""

import os
import subprocess
import sys
from collections.abc import Callable

from megatron_blackmamba.formats.events import Event, NotExported
from megatron_blackmamba.formats.run_folder import RunFolder


class ExportChecks:
    """The exports that wait for their check, and the process that checks the first of them."""

    def __init__(self, how: str, folder: RunFolder, report: Callable[[Event], None]) -> None:
        self._how, self._folder, self._report = how, folder, report
        self._waiting: list[int] = []
        self._process: subprocess.Popen[str] | None = None

    def add(self, step: int) -> None:
        """Check an export as soon as the earlier ones are checked."""
        if self._how != "none":
            self._waiting.append(step)
            self.poll()

    def poll(self) -> None:
        """Report a failed check, and begin the next."""
        if self._process is not None and self._process.poll() is not None:
            self._finish()
        if self._process is None and self._waiting:
            export = str(self._folder.export(self._waiting[0]))
            words = ["-m", "megatron_blackmamba", "verify", export, "--check", self._how]
            self._process = subprocess.Popen(
                ["nice", "-n", "19", sys.executable, *words],
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C ends the run after its step; this process ends with it
            )

    def wait(self) -> None:
        """Finish all checks."""
        while self._process is not None:
            self._finish()
            self.poll()

    def stop(self) -> None:
        """End the check that runs, and drop the others: `blackmamba verify` can repeat them."""
        self._waiting.clear()
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _finish(self) -> None:
        assert self._process is not None
        step = self._waiting.pop(0)
        _, errors = self._process.communicate()
        code, self._process = self._process.returncode, None
        if code:
            lines = errors.strip().splitlines() or [f"its process ended with code {code}"]
            self._report(NotExported(step=step, problem=lines[-1].removeprefix("blackmamba: ")))
