"""What a run leaves for people: a record of each step, its events, and a trace if asked for."""

import time
from dataclasses import replace

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats.events import Event
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.runtime.world import World
from megatron_blackmamba.training.metrics import Taken, record
from megatron_blackmamba.training.record.loggers import Loggers
from megatron_blackmamba.training.record.speed import Utilisation
from megatron_blackmamba.training.record.tracing import Tracing


class Journal:
    """The loggers of a run, the clock of its steps and the profiler. Every rank has one; rank 0 alone writes logs."""

    def __init__(self, config: RunConfig, world: World, folder: RunFolder, begins_after: int = 0) -> None:
        """Open the logs of a run that begins after a step of its trunk, or after 0."""
        self._loggers = Loggers.for_run(config, folder, world.is_main, begins_after)
        self._tracing = Tracing(config.training.profile, folder.profile, world.rank)
        self.utilisation = Utilisation(config, world.size)
        self._traced: Event | None = None
        self._begun = 0.0

    def step_begins(self, step: int) -> None:
        self._begun = time.perf_counter()
        self._tracing.before(step)

    def step_ends(self, step: int) -> float:
        """Return the seconds of the step, which is over but for validation and saving."""
        self._traced = self._tracing.after(step)
        return time.perf_counter() - self._begun

    def step(self, taken: Taken) -> None:
        """Measure and record what is due of a step. Every rank calls this: metrics may exchange."""
        self._loggers.step(record(taken))
        if self._traced:
            self.event(self._traced, taken.step)
            self._traced = None

    def event(self, event: Event, step: int) -> None:
        """Record what happened; `step` is the one last taken, for events that name none."""
        self._loggers.event(event if event.step is not None else replace(event, step=step))

    def rewind(self, step: int) -> None:
        """Remove the records of later steps: they come again."""
        self._loggers.rewind(step)

    def close(self) -> None:
        self._loggers.close()
