"""TensorBoard: scalars as curves, the config as a text. What a full disk refuses is written later, to another file."""

import contextlib
import functools
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_blackmamba.config import RunConfig, to_yaml
from megatron_blackmamba.formats.step_records import StepRecord
from megatron_blackmamba.training.record.logger import Logger

FLUSH_SECONDS = 30.0
"""How long a record may wait in TensorBoard's buffers; a record is kept until it has left them."""
RETRY_SECONDS = 30.0
"""How long to wait after a failure before the next file."""


class TensorBoard(Logger):
    """The records of a run as curves; the folder is made with the first record."""

    def __init__(self, folder: Path, config: RunConfig, say: Callable[[str], None] = print) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _silence_writer_threads()
        self._folder, self._say, self._make = folder, say, SummaryWriter
        self._config = textwrap.indent(to_yaml(config), "    ")  # Markdown's code
        self._writer: Any = None
        self._kept: list[StepRecord] = []
        """Records that may not be on disk yet."""
        self._purge: int | None = None
        """The first step of the next file; TensorBoard forgets it and later ones of earlier files."""
        self._flushed = self._failed = 0.0
        """When records were last flushed, and when writing failed."""

    def step(self, record: StepRecord) -> None:
        """Add a record, with all that wait if the disk takes them again."""
        self._kept.append(record)
        now = time.monotonic()
        if self._failed and now < self._failed + RETRY_SECONDS:
            return
        try:
            if self._writer is not None and not self._folder.is_dir():  # it was moved or removed
                self._drop()
            if self._writer is None:
                self._open()
                self._flush()
            else:
                self._add(record)
                if now >= self._flushed + FLUSH_SECONDS:
                    self._flush()
        except Exception as error:  # of its thread; whatever it is, a later file may work
            self._fail(error)

    def rewind(self, step: int) -> None:
        self._kept = [record for record in self._kept if record.step <= step]
        self._drop()
        self._purge = step + 1 if not self._kept else self._kept[0].step

    def close(self) -> None:
        """Write what waits. Raises what keeps it from being written."""
        self._failed = 0.0
        if self._kept and self._writer is None:
            self._open()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> None:
        """Begin a file with the config and the records that wait."""
        self._writer = self._make(str(self._folder), purge_step=self._purge)
        self._writer.add_text("config", self._config, 0)
        for kept in self._kept:
            self._add(kept)

    def _add(self, record: StepRecord) -> None:
        for name, value in record.finite():
            self._writer.add_scalar(name, value, record.step)

    def _flush(self) -> None:
        self._writer.flush()
        self._flushed = time.monotonic()
        self._kept.clear()
        if self._failed:
            self._failed = 0.0
            self._say("TensorBoard: all curves are written again")

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._say(f"TensorBoard cannot be written and is tried again: {error}")
        self._failed = time.monotonic()
        self._drop()
        self._purge = self._kept[0].step if self._kept else None

    def _drop(self) -> None:
        """Close the file as far as it can be."""
        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()
            self._writer = None


@functools.cache
def _silence_writer_threads() -> None:
    """Print no traceback when TensorBoard's writer thread fails: the next call raises its error again."""
    report = threading.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        if not type(failure.thread).__module__.startswith("tensorboard."):
            report(failure)

    threading.excepthook = hook
