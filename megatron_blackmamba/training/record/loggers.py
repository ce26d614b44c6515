"""Loggers of a run: metrics.jsonl, events.jsonl and log.txt always, TensorBoard and wandb when asked for. Rank 0 only.

Logging never stops a run. Lines that a full disk refuses are kept and written later, and the end of the run says which
are missing. A damaged file is set aside, or its damaged lines are. No logger writes before the run has begun.
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
from typing import Any, Protocol

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.events import Event, LoggingProblem
from megatron_blackmamba.formats.events import parse_line as parse_event
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.formats.step_records import StepRecord, parse_line
from megatron_blackmamba.training.record.display import Display, step_line
from megatron_blackmamba.training.record.line_file import LineFile
from megatron_blackmamba.training.record.tensorboard import TensorBoard

WANDB_ID = re.compile(r"[0-9a-z]{6,64}")


class LoggingError(ValueError):
    """A way of logging that this machine lacks. The message says how to get it."""


class Logger(Protocol):
    def step(self, record: StepRecord) -> None: ...
    def event(self, event: Event, time: datetime) -> None: ...
    def rewind(self, step: int) -> None:
        """Remove what came after `step`: it will come again."""

    def close(self) -> None: ...


class MetricsFile:
    """metrics.jsonl: one object a step, each step once, whatever happened in between."""

    def __init__(self, path: Path, say: Callable[[str], None] = print, begins_after: int = 0) -> None:
        """Open the file of a run that begins after a step: that of its trunk, or 0."""
        self._lines, self._say, self._begins_after = LineFile(path, say), say, begins_after

    def step(self, record: StepRecord) -> None:
        self._lines.write(record.to_json())

    def event(self, event: Event, time: datetime) -> None:
        if self._lines.waiting:
            self._lines.flush()

    def rewind(self, step: int) -> None:
        """Keep the records up to `step`. Lines that are no record are set aside."""
        waiting = [line for line in self._lines.waiting if _step_of(line) <= step]
        self._lines.waiting = waiting
        self._lines.flush()
        try:
            damage = self._lines.set_aside(parse_line)
            if damage:
                self._say(damage)
            size, last = 0, 0
            with open(self._lines.path, "rb") as file:
                for line in file:
                    if _step_of(line) > step:
                        break
                    size, last = size + len(line), _step_of(line)
            self._lines.truncate(size)
        except OSError as error:  # a log is no reason not to train
            self._say(f"{self._lines.path}: cannot be read: {error.strerror}; steps may be in it twice")
            return
        if max([self._begins_after, last, *map(_step_of, waiting)]) < step:
            self._say(f"{self._lines.path}: ends at step {last}; the records up to step {step} are missing")

    def close(self) -> None:
        missing = self._lines.close()
        if missing:
            self._lines.waiting.clear()
            self._say(missing)


class EventsFile:
    """events.jsonl: one object an event. Lines of interrupted attempts stay."""

    def __init__(self, path: Path, say: Callable[[str], None] = print) -> None:
        self._lines, self._say = LineFile(path, say), say

    def step(self, record: StepRecord) -> None:
        if self._lines.waiting:
            self._lines.flush()

    def event(self, event: Event, time: datetime) -> None:
        self._lines.write(event.to_json(time))

    def rewind(self, step: int) -> None:
        """Set aside the lines that are no events."""
        self._lines.flush()
        try:
            damage = self._lines.set_aside(parse_event)
        except OSError as error:  # a log is no reason not to train
            damage = f"{self._lines.path}: cannot be read: {error.strerror}"
        if damage:
            self._say(damage)

    def close(self) -> None:
        _print_missing(self._lines)


class LogText:
    """log.txt: every step and event with the time. Lines of interrupted attempts stay."""

    def __init__(self, path: Path, say: Callable[[str], None] = print) -> None:
        self._lines = LineFile(path, say)

    def step(self, record: StepRecord) -> None:
        self._write(step_line(record), datetime.now())

    def event(self, event: Event, time: datetime) -> None:
        self._write(event.sentence, time)

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        _print_missing(self._lines)

    def _write(self, text: str, time: datetime) -> None:
        for line in text.splitlines():
            self._lines.write(f"{time:%Y-%m-%d %H:%M:%S}  {line}")


class Wandb:
    """Weights & Biases; one run there for one run folder here, however often it is resumed."""

    def __init__(self, config: RunConfig, run: RunFolder) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise LoggingError(
                f"logging.wandb={config.logging.wandb}, but wandb is not installed:"
                " pip install 'megatron-blackmamba[wandb]', or logging.wandb=off"
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

    def event(self, event: Event, time: datetime) -> None:
        pass

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        if "_run" in vars(self):
            self._run.finish()


class Loggers:
    """All of them as one. Empty on every rank but the first."""

    def __init__(self, always: list[Logger], optional: list[Logger]) -> None:
        self._always = always
        self._optional = optional
        self._step = 0

    @classmethod
    def for_run(cls, config: RunConfig, run: RunFolder, first_rank: bool, begins_after: int = 0) -> "Loggers":
        if not first_rank:
            return cls([], [])
        loggers = cls([], [])
        makers: list[Callable[[], Logger]] = []
        if config.logging.tensorboard:
            makers.append(lambda: TensorBoard(run.tensorboard, config, loggers.problem))
        if config.logging.wandb != "off":
            makers.append(lambda: Wandb(config, run))
        files: list[Logger] = [
            MetricsFile(run.metrics, loggers.problem, begins_after),
            EventsFile(run.events, loggers.problem),
            LogText(run.log, loggers.problem),
        ]
        loggers._always = [*files, Display(config)]
        for make in makers:
            try:
                loggers._optional.append(make())
            except LoggingError:
                raise
            except Exception as error:  # a full disk, for example
                loggers.problem(f"a logger could not be started and is off: {error}")
        return loggers

    def step(self, record: StepRecord) -> None:
        self._step = record.step
        self._each(lambda logger: logger.step(record))

    def event(self, event: Event) -> None:
        time = datetime.now()
        self._each(lambda logger: logger.event(event, time))

    def problem(self, text: str) -> None:
        """Tell all loggers about a problem of one of them."""
        self.event(LoggingProblem(step=self._step, problem=text))

    def rewind(self, step: int) -> None:
        self._step = step
        self._each(lambda logger: logger.rewind(step))

    def close(self) -> None:
        self._each(lambda logger: logger.close())

    def _each(self, call: Callable[[Logger], None]) -> None:
        for logger in self._always:
            call(logger)
        for logger in list(self._optional):
            try:
                call(logger)
            except Exception as error:  # these may raise anything; none is worth a run of weeks
                self._optional.remove(logger)
                self.problem(f"{type(logger).__name__} failed and is off from here on: {error}")


def _step_of(line: bytes) -> int:
    record = parse_line(line)
    return 0 if record is None else record["step"]


def _print_missing(lines: LineFile) -> None:
    """Close a file, and say on standard error what could not be written."""
    missing = lines.close()
    if missing:
        with contextlib.suppress(OSError):
            print(missing, file=sys.stderr, flush=True)
