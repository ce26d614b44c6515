"""training.profile: a trace of some steps, one file a rank, to open in Perfetto or chrome://tracing."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from megatron_blackmamba.formats.events import Traced


class Tracing:
    """A profiler trace from the first to the last requested step; does nothing without a request."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path, rank: int) -> None:
        self.steps, self.folder, self.rank = steps, folder, rank
        self._profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        if self.steps and self.steps[0] == step:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()

    def after(self, step: int) -> Traced | None:
        """Write the trace after the last step."""
        if self._profiler is None or not self.steps or step < self.steps[1]:
            return None
        self._profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"steps_{self.steps[0]}_{self.steps[1]}_rank_{self.rank}.json.gz"
        self._profiler.export_chrome_trace(str(path))
        self._profiler = None
        return Traced(first=self.steps[0], last=self.steps[1], path=str(path))
