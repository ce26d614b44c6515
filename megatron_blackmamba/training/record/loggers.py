"""Loggers of a run: metrics.jsonl, events.jsonl, log.txt and wandb; TensorBoard has a file of its own.

Lines that a full disk refuses are kept and written later, and the end of the run says which are missing. A damaged file
is set aside, or its damaged lines are. No logger writes before the run has begun.
"""

import contextlib
import functools
import importlib.util
import re
import sys
import uuid
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.events import Event
from megatron_blackmamba.formats.events import parse_line as parse_event
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.formats.step_records import StepRecord, parse_line
from megatron_blackmamba.training.record.display import step_line
from megatron_blackmamba.training.record.line_file import LineFile
from megatron_blackmamba.training.record.logger import Logger

WANDB_ID = re.compile(r"[0-9a-z]{6,64}")


class LoggingError(ValueError):
    """A way of logging that this machine lacks. The message says how to get it."""


class _LinesLogger(Logger):
    """A logger into a file of lines. Any news is a reason to write the lines that wait."""

    def __init__(self, path: Path, say: Callable[[str], None] = print, begins_after: int = 0) -> None:
        """Open the file of a run that begins after a step: that of its trunk, or 0."""
        self._lines, self._say, self._begins_after = LineFile(path, say), say, begins_after

    def step(self, record: StepRecord) -> None:
        if self._lines.waiting:
            self._lines.flush()

    def event(self, event: Event, time: datetime) -> None:
        if self._lines.waiting:
            self._lines.flush()

    def close(self) -> None:
        """Close the file, and say on standard error what could not be written."""
        if missing := self._lines.close():
            with contextlib.suppress(OSError):
                print(missing, file=sys.stderr, flush=True)

    def _set_aside(self, whole: Callable[[bytes], object]) -> None:
        if damage := self._lines.set_aside(whole):
            self._say(damage)


class MetricsFile(_LinesLogger):
    """metrics.jsonl: one object a step, each step once, whatever happened in between."""

    def step(self, record: StepRecord) -> None:
        self._lines.write(record.to_json())

    def rewind(self, step: int) -> None:
        """Keep the records up to `step`. Lines that are no record are set aside."""
        waiting = [line for line in self._lines.waiting if _step_of(line) <= step]
        self._lines.waiting = waiting
        self._lines.flush()
        try:
            self._set_aside(parse_line)
            size, last, first = 0, 0, 0
            with open(self._lines.path, "rb") as file:
                for line in file:
                    if _step_of(line) > step:
                        break
                    size, last = size + len(line), _step_of(line)
                    first = first or last
            self._lines.truncate(size)
        except OSError as error:  # a log is no reason not to train
            self._say(f"{self._lines.path}: cannot be read: {error.strerror}; steps may be in it twice")
            return
        if first > self._begins_after + 1:
            self._say(f"{self._lines.path}: begins at step {first}; the records before it are missing")
        if max([self._begins_after, last, *map(_step_of, waiting)]) < step:
            self._say(f"{self._lines.path}: ends at step {last}; the records up to step {step} are missing")

    def close(self) -> None:
        if missing := self._lines.close():
            self._lines.waiting.clear()
            self._say(missing)


class EventsFile(_LinesLogger):
    """events.jsonl: one object an event. Lines of interrupted attempts stay."""

    def event(self, event: Event, time: datetime) -> None:
        self._lines.write(event.to_json(time))

    def rewind(self, step: int) -> None:
        """Set aside the lines that are no events."""
        self._lines.flush()
        try:
            self._set_aside(parse_event)
        except OSError as error:  # a log is no reason not to train
            self._say(f"{self._lines.path}: cannot be read: {error.strerror}")


class LogText(_LinesLogger):
    """log.txt: every step and event with the time. Lines of interrupted attempts stay."""

    def step(self, record: StepRecord) -> None:
        self._write(step_line(record), datetime.now())

    def event(self, event: Event, time: datetime) -> None:
        self._write(event.sentence, time)

    def _write(self, text: str, time: datetime) -> None:
        for line in text.splitlines():
            self._lines.write(f"{time:%Y-%m-%d %H:%M:%S}  {line}")


class Wandb(Logger):
    """Weights & Biases; one run there for one run folder here, however often it is resumed."""

    def __init__(self, config: RunConfig, run: RunFolder) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise LoggingError(
                f"logging.wandb={config.logging.wandb}, but wandb is not installed:"
                " pip install -e '.[wandb]', or logging.wandb=off"
            )
        self._config, self._folder = config, run.root

    @functools.cached_property
    def _run(self) -> Any:
        """Start the run there, with the first record."""
        import wandb

        config, root = self._config, self._folder
        identity = root / "wandb" / "id"
        known = identity.read_bytes()[:256].decode(errors="replace") if identity.exists() else ""
        if not WANDB_ID.fullmatch(known):  # missing, or damaged
            identity.parent.mkdir(parents=True, exist_ok=True)
            known = uuid.uuid4().hex[:12]
            atomic.write_text(identity, known)
        run = wandb.init(
            project=config.logging.wandb_project,
            name=config.name,
            id=known,
            resume="allow",
            mode="offline" if config.logging.wandb == "offline" else "online",
            dir=str(root),
            config=config.model_dump(mode="json", by_alias=True),
        )
        run.define_metric("*", step_metric="step")
        return run

    def step(self, record: StepRecord) -> None:
        self._run.log({"step": record.step, **dict(record.finite())})

    def close(self) -> None:
        if "_run" in vars(self):
            self._run.finish()


def _step_of(line: bytes) -> int:
    record = parse_line(line)
    return 0 if record is None else record["step"]
