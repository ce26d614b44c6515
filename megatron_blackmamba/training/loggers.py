"""Where a run's numbers go: metrics.jsonl and log.txt always, TensorBoard and wandb when asked for. Rank 0 only.

Logging never stops a run. Lines that a full disk refuses are kept and written later, and the end of the run says which
are missing. A damaged file is set aside, or its damaged lines are.
"""

import contextlib
import errno
import importlib.util
import os
import re
import sys
import time
import uuid
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Protocol

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.training.display import Display, step_line
from megatron_blackmamba.training.metrics import StepMetrics, parse_line

LAST_SECONDS = 5.0
"""How long the end of a run waits for a full disk to take the last lines."""
WANDB_ID = re.compile(r"[0-9a-z]{6,64}")


class LoggingError(ValueError):
    """A way of logging that this machine lacks. The message says how to get it."""


class Logger(Protocol):
    def step(self, metrics: StepMetrics) -> None: ...
    def message(self, text: str) -> None: ...
    def rewind(self, step: int) -> None:
        """Remove what came after `step`: it will come again."""

    def close(self) -> None: ...


class LineFile:
    """Appends whole lines. Lines that cannot be written wait in memory for the next attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[bytes] = []
        """Lines not yet written."""
        self.problem = ""
        """Why they could not be written."""
        self._file: int | None = None
        self.flush()

    def write(self, line: str) -> None:
        self.waiting.append(line.encode() + b"\n")
        self.flush()

    def flush(self) -> bool:
        """Try to write the lines that wait; return whether all are written."""
        try:
            if self._file is None:
                self._file = _open_for_lines(self.path)
            if self.waiting:
                self._append(self._file)
        except OSError as error:
            self.problem = error.strerror or str(error)
        return not self.waiting

    def _append(self, file: int) -> None:
        content = b"".join(self.waiting)
        written = os.write(file, content)
        whole = content.rfind(b"\n", 0, written) + 1
        del self.waiting[: content.count(b"\n", 0, whole)]
        if whole < written:  # the disk became full within a line: take back its beginning
            os.truncate(file, os.fstat(file).st_size - (written - whole))
        if self.waiting:
            self.problem = os.strerror(errno.ENOSPC)

    def truncate(self, size: int) -> None:
        """Cut the file. Lines that wait stay."""
        if self._file is not None:
            os.truncate(self._file, size)

    def reopen(self) -> None:
        """Follow the path to the file that has taken its place."""
        if self._file is not None:
            os.close(self._file)
        self._file = None
        self.flush()

    def close(self) -> str | None:
        """Write what waits, trying for LAST_SECONDS, and close. Return what is missing, in words."""
        end = time.monotonic() + LAST_SECONDS
        while not self.flush() and time.monotonic() < end:
            time.sleep(0.2)
        missing = (
            f"{self.path}: {len(self.waiting)} lines could not be written: {self.problem}" if self.waiting else None
        )
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._file)
            os.close(self._file)
            self._file = None
        return missing


class MetricsFile:
    """metrics.jsonl: one object a step, each step once, whatever happened in between."""

    def __init__(self, path: Path, say: Callable[[str], None] = print) -> None:
        self._lines, self._say = LineFile(path), say

    def step(self, metrics: StepMetrics) -> None:
        self._lines.write(metrics.to_json())

    def message(self, text: str) -> None:
        if self._lines.waiting:
            self._lines.flush()

    def rewind(self, step: int) -> None:
        """Keep the records up to `step`. Lines that are no record are set aside."""
        waiting = [line for line in self._lines.waiting if _step_of(line) <= step]
        self._lines.waiting = waiting
        try:
            self._set_aside_damage()
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
        if max([last, *map(_step_of, waiting)]) < step:
            self._say(f"{self._lines.path}: ends at step {last}; the records up to step {step} are missing")

    def close(self) -> None:
        missing = self._lines.close()
        if missing:
            self._lines.waiting.clear()
            self._say(missing)

    def _set_aside_damage(self) -> None:
        """Move lines that are no record into a file beside this one. The others stay, in their order."""
        path = self._lines.path
        with open(path, "rb") as file:
            if all(parse_line(line) is not None for line in file):
                return
        with open(path, "rb") as file:
            lines = file.readlines()
        bad = [line for line in lines if parse_line(line) is None]
        aside = path.with_name(f"{path.name}.damaged")
        with open(aside, "ab") as file:
            file.writelines(line.rstrip(b"\n") + b"\n" for line in bad)
        atomic.write_bytes(path, b"".join(line for line in lines if parse_line(line) is not None))
        self._lines.reopen()
        self._say(f"{path}: {len(bad)} damaged lines set aside in {aside.name}")


class LogText:
    """log.txt: every event with the time. Lines of interrupted attempts stay."""

    def __init__(self, path: Path) -> None:
        self._lines = LineFile(path)

    def step(self, metrics: StepMetrics) -> None:
        self.message(step_line(metrics))

    def message(self, text: str) -> None:
        for line in text.splitlines():
            self._lines.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {line}")

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        missing = self._lines.close()
        if missing:
            print(missing, file=sys.stderr, flush=True)


class TensorBoard:
    """The same numbers as curves."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open = lambda purge: SummaryWriter(str(folder), purge_step=purge)
        self._writer = self._open(None)

    def step(self, metrics: StepMetrics) -> None:
        for name, value in metrics.scalars():
            self._writer.add_scalar(name, value, metrics.step)

    def message(self, text: str) -> None:
        pass

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._writer = self._open(step + 1)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases; one run there for one run folder here, however often it is resumed."""

    def __init__(self, config: RunConfig, run: RunFolder) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise LoggingError(
                f"logging.wandb={config.logging.wandb}, but wandb is not installed:"
                " pip install 'megatron-blackmamba[wandb]', or logging.wandb=off"
            )
        import wandb

        identity = run.root / "wandb" / "id"
        known = identity.read_bytes()[:256].decode(errors="replace") if identity.exists() else ""
        if not WANDB_ID.fullmatch(known):  # missing, or damaged
            identity.parent.mkdir(parents=True, exist_ok=True)
            known = uuid.uuid4().hex[:12]
            atomic.write_text(identity, known)
        self._run = wandb.init(
            project=config.logging.wandb_project,
            name=config.name,
            id=known,
            resume="allow",
            mode="offline" if config.logging.wandb == "offline" else "online",
            dir=str(run.root),
            config=config.model_dump(mode="json", by_alias=True),
        )
        self._run.define_metric("*", step_metric="step")

    def step(self, metrics: StepMetrics) -> None:
        self._run.log({"step": metrics.step, **dict(metrics.scalars())})

    def message(self, text: str) -> None:
        pass

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


class Loggers:
    """All of them as one. Empty on every rank but the first."""

    def __init__(self, always: list[Logger], optional: list[Logger]) -> None:
        self._always = always
        self._optional = optional

    @classmethod
    def for_run(cls, config: RunConfig, run: RunFolder, first_rank: bool) -> "Loggers":
        if not first_rank:
            return cls([], [])
        loggers = cls([], [])
        makers: list[Callable[[], Logger]] = []
        if config.logging.tensorboard:
            makers.append(lambda: TensorBoard(run.tensorboard))
        if config.logging.wandb != "off":
            makers.append(lambda: Wandb(config, run))
        loggers._always = [MetricsFile(run.metrics, loggers.message), LogText(run.log), Display(config)]
        for make in makers:
            try:
                loggers._optional.append(make())
            except LoggingError:
                raise
            except Exception as error:  # a full disk, for example
                loggers.message(f"a logger could not be started and is off: {error}")
        return loggers

    def step(self, metrics: StepMetrics) -> None:
        self._each(lambda logger: logger.step(metrics))

    def message(self, text: str) -> None:
        self._each(lambda logger: logger.message(text))

    def rewind(self, step: int) -> None:
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
                self.message(f"{type(logger).__name__} failed and is off from here on: {error}")


def _step_of(line: bytes) -> int:
    record = parse_line(line)
    return 0 if record is None else record["step"]


def _open_for_lines(path: Path) -> int:
    """Open a file for appending lines. Drop a last line that a crash cut short; set aside what is no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        os.replace(path, path.with_name(f"{path.name}.damaged"))
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.truncate(file, _end_of_last_line(path))
    except OSError:
        os.close(file)
        raise
    return file


def _end_of_last_line(path: Path) -> int:
    """Return the number of bytes up to the last newline."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        while size:
            start = max(0, size - 65536)
            file.seek(start)
            newline = file.read(size - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            size = start
    return 0
