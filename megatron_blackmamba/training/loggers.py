"""Where a run's numbers go: metrics.jsonl and log.txt always, TensorBoard and wandb when asked for. Rank 0 only.

Logging never stops a run: what a full disk refuses is kept and written later.
"""

import contextlib
import importlib.util
import json
import os
import uuid
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Protocol

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.training.display import Display, step_line
from megatron_blackmamba.training.metrics import StepMetrics


class LoggingError(ValueError):
    """A way of logging that this machine lacks; the message says how to get it."""


class Logger(Protocol):
    def step(self, metrics: StepMetrics) -> None: ...
    def message(self, text: str) -> None: ...
    def rewind(self, step: int) -> None:
        """Forget what came after `step`: it will come again."""

    def close(self) -> None: ...


class LineFile:
    """Appends whole lines. What a full disk refuses waits in memory for the next line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._waiting = b""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.truncate(self._file, _end_of_last_line(path))

    def write(self, line: str) -> None:
        self._waiting += line.encode() + b"\n"
        with contextlib.suppress(OSError):
            while self._waiting:
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]

    def truncate(self, size: int) -> None:
        self._waiting = b""
        os.truncate(self._file, size)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._file)
        os.close(self._file)


class MetricsFile:
    """metrics.jsonl: one object a step, each step once, whatever happened in between."""

    def __init__(self, path: Path) -> None:
        self._lines = LineFile(path)

    def step(self, metrics: StepMetrics) -> None:
        self._lines.write(metrics.to_json())

    def message(self, text: str) -> None:
        pass

    def rewind(self, step: int) -> None:
        size = 0
        with open(self._lines.path, "rb") as file:
            for line in file:
                if json.loads(line)["step"] > step:
                    break
                size += len(line)
        self._lines.truncate(size)

    def close(self) -> None:
        self._lines.close()


class LogText:
    """log.txt: what happened, line by line, with the time; every attempt is kept."""

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
        self._lines.close()


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
        if not identity.exists():
            identity.parent.mkdir(parents=True, exist_ok=True)
            identity.write_text(uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=config.logging.wandb_project,
            name=config.name,
            id=identity.read_text(),
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
    """All of them as one; empty on every rank but the first."""

    def __init__(self, always: list[Logger], optional: list[Logger]) -> None:
        self._always = always
        self._optional = optional

    @classmethod
    def for_run(cls, config: RunConfig, run: RunFolder, first_rank: bool) -> "Loggers":
        if not first_rank:
            return cls([], [])
        optional: list[Logger] = []
        if config.logging.tensorboard:
            optional.append(TensorBoard(run.tensorboard))
        if config.logging.wandb != "off":
            optional.append(Wandb(config, run))
        return cls([MetricsFile(run.metrics), LogText(run.log), Display(config)], optional)

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
            except Exception as error:  # theirs to raise whatever they like; not worth a run of weeks
                self._optional.remove(logger)
                self.message(f"{type(logger).__name__} failed and is off from here on: {error}")


def _end_of_last_line(path: Path) -> int:
    """Bytes up to the last newline: a crash may have cut the line after it."""
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
