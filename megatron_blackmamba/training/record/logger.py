"""The interface of a logger."""

from datetime import datetime

from megatron_blackmamba.formats.events import Event
from megatron_blackmamba.formats.step_records import StepRecord


class Logger:
    """One place that steps and events go to; a subclass says what it wants to know."""

    def step(self, record: StepRecord) -> None: ...
    def event(self, event: Event, time: datetime) -> None: ...
    def rewind(self, step: int) -> None:
        """Remove what came after `step`: it will come again."""

    def close(self) -> None: ...
