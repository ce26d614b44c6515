"""Records of a run for people: the scalars of each step, the events, and a trace if asked for.

Logging never stops a run.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats.events import Event, LoggingProblem
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.formats.step_records import StepRecord
from megatron_blackmamba.training.record.display import Display
from megatron_blackmamba.training.record.logger import Logger
from megatron_blackmamba.training.record.loggers import EventsFile, LoggingError, LogText, MetricsFile, Wandb
from megatron_blackmamba.training.record.tensorboard import TensorBoard
from megatron_blackmamba.training.record.tracing import Tracing
from megatron_blackmamba.training.watch.speed import Utilisation


class Journal:
    """The clock and the profiler of a run's steps, and on rank 0 all its loggers as one."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, rank: int = 0, ranks: int = 1, begins_after: int = 0
    ) -> None:
        """Open the logs of a run that begins after a step of its trunk, or after 0."""
        self.utilisation = Utilisation(config, ranks)
        self._tracing = Tracing(config.training.profile, folder.profile, rank)
        self._traced: Event | None = None
        self._begun, self._step = 0.0, 0
        self._always: list[Logger] = []
        self._optional: list[Logger] = []
        if rank == 0:
            self._always = [
                MetricsFile(folder.metrics, self.problem, begins_after),
                EventsFile(folder.events, self.problem),
                LogText(folder.log, self.problem),
                Display(config),
            ]
            if config.logging.tensorboard:
                self._add(lambda: TensorBoard(folder.tensorboard, config, self.problem))
            if config.logging.wandb != "off":
                self._add(lambda: Wandb(config, folder))

    def step_begins(self, step: int) -> None:
        self._traced = self._tracing.before(step)
        self._begun = time.perf_counter()

    def step_ends(self, step: int) -> float:
        """Return the seconds of the step, which is over but for validation and saving."""
        seconds = time.perf_counter() - self._begun
        self._traced = self._tracing.after(step) or self._traced
        return seconds

    def step(self, record: StepRecord) -> None:
        """Record a step."""
        self._step = record.step
        self._each(lambda logger: logger.step(record))
        if self._traced:
            self.event(self._traced, record.step)
            self._traced = None

    def end_trace(self, step: int) -> None:
        """Write the trace that the end of the job cuts short."""
        if traced := self._tracing.end(step):
            self.event(traced, step)

    def event(self, event: Event, step: int) -> None:
        """Record what happened; `step` is the one last taken, for events that name none."""
        stamped, time = event if event.step is not None else replace(event, step=step), datetime.now()
        self._each(lambda logger: logger.event(stamped, time))

    def problem(self, text: str) -> None:
        """Tell all loggers about a problem of one of them."""
        self.event(LoggingProblem(problem=text), self._step)

    def rewind(self, step: int) -> None:
        """Remove the records of later steps: they come again."""
        self._step = step
        self._each(lambda logger: logger.rewind(step))

    def close(self) -> None:
        self._each(lambda logger: logger.close())

    def _add(self, make: Callable[[], Logger]) -> None:
        try:
            self._optional.append(make())
        except LoggingError:
            raise
        except Exception as error:  # a full disk, for example
            self.problem(f"a logger could not be started and is off: {error}")

    def _each(self, call: Callable[[Logger], None]) -> None:
        for logger in self._always:
            call(logger)
        for logger in list(self._optional):
            try:
                call(logger)
            except Exception as error:  # these may raise anything; none is worth a run of weeks
                self._optional.remove(logger)
                self.problem(f"{type(logger).__name__} failed and is off from here on: {error}")
