"""training.profile: a trace of some steps, one file a rank, to open in Perfetto or chrome://tracing.

A trace that cannot be made costs no step.
"""

import contextlib
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from megatron_blackmamba.formats.events import Event, LoggingProblem, Traced


class Tracing:
    """A profiler trace of the requested steps that this job takes; does nothing without a request."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path, rank: int) -> None:
        self.steps, self.folder, self.rank = steps, folder, rank
        self._profiler: torch.profiler.profile | None = None
        self._first = 0

    def before(self, step: int) -> Event | None:
        """Begin with the first of the steps that this job takes."""
        if self._profiler is not None or not self.steps or not self.steps[0] <= step <= self.steps[1]:
            return None
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler, self._first = torch.profiler.profile(activities=activities), step
        try:
            self._profiler.start()
        except Exception as error:  # another profiler, for example
            return self._failed(error)
        return None

    def after(self, step: int) -> Event | None:
        """Write the trace after the last step."""
        return self.end(step) if self.steps and step >= self.steps[1] else None

    def end(self, step: int) -> Event | None:
        """Write the trace up to a step, if one is being made."""
        if self._profiler is None:
            return None
        path = self.folder / f"steps_{self._first}_{step}_rank_{self.rank}.json.gz"
        try:
            self._profiler.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(path))
        except Exception as error:  # a full disk, for example
            return self._failed(error)
        self._profiler = None
        return Traced(first=self._first, last=step, path=str(path))

    def _failed(self, error: Exception) -> Event:
        """Trace no more; rank 0 records why, and the others, which have no records, print it."""
        self._profiler = self.steps = None
        problem = f"rank {self.rank} has no trace: {error}"
        if self.rank:
            with contextlib.suppress(OSError):  # standard error may lie on a full disk
                print(problem, file=sys.stderr, flush=True)
        return LoggingProblem(problem=problem)
