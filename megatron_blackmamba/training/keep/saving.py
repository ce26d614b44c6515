"""The schedule of saves. A failed save is reported and tried again, and training continues."""

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_blackmamba.checkpoint import Checkpoints, NotFiniteError, SaveError
from megatron_blackmamba.formats.events import Event, NotSaved, Saved
from megatron_blackmamba.settings import CheckpointConfig

State = Callable[[], dict[str, Any]]
LAST_ATTEMPTS = 6
LAST_PAUSE_SECONDS = 5.0


class Saver:
    """A saver that saves at multiples of `checkpoint.every` and `checkpoint.keep_every`, and once at the end."""

    def __init__(
        self, config: CheckpointConfig, checkpoints: Checkpoints, state: State, report: Callable[[Event], None]
    ) -> None:
        self.config, self.checkpoints, self.state, self.report = config, checkpoints, state, report
        self._begun: int | None = None
        self._retry_at: int | None = None
        self._not_finite = False
        self._newest = 0
        self._attempt = 0
        """Which attempt to save the last step this is; 0 before."""
        self.last_failed = False
        """The last step could not be written. Another start, on another disk or node, may succeed."""

    def resumed_at(self, step: int) -> None:
        """Note that this step is on disk already."""
        self._begun = self._newest = step

    def after_step(self, step: int) -> None:
        """Begin a save if one is due. Publish the one being written if it is done."""
        self._finish(step, wait=False)
        if self._is_due(step):
            self._begin(step)
            self._finish(step, wait=not self.config.asynchronous)

    def last(self, step: int) -> bool:
        """Save `step`, wait until it is on disk, and return whether it is. On a full disk, try for a while."""
        for self._attempt in range(1, LAST_ATTEMPTS + 1):
            if self._attempt > 1:
                time.sleep(LAST_PAUSE_SECONDS)
            if self._begun != step:
                self._begin(step)
            self._finish(step, wait=True)
            if self._begun == step:
                return True
            if self._not_finite:  # waiting does not change the weights
                return False
        self.last_failed = True
        return False

    def wait(self) -> None:
        """Wait for the save under way, if there is one."""
        self._finish(None, wait=True)

    def settled(self) -> int | None:
        """Return the newest checkpoint to go back to, the one being written included."""
        self.wait()
        return self.checkpoints.newest()

    def postpone(self, step: int) -> None:
        """Save after the next step what is due at this one, which is part of a streak of bad steps."""
        if self._is_due(step):
            self._retry_at = step + 1

    def _is_due(self, step: int) -> bool:
        return step == self._retry_at or self.config.is_due(step)

    def _begin(self, step: int) -> None:
        self.wait()
        self._retry_at = None
        try:
            self.checkpoints.save(step, self.state())
            self._begun = step
        except SaveError as error:
            self._failed(step, error)

    def _finish(self, step: int | None, wait: bool) -> None:
        try:
            for saved in self.checkpoints.finish(wait):
                self._not_finite, self._newest = False, saved
                self.report(Saved(step=saved))
        except SaveError as error:
            self._failed(step, error)

    def _failed(self, step: int | None, error: SaveError) -> None:
        self._begun = None
        self._not_finite = isinstance(error, NotFiniteError)
        if self._not_finite:
            self.report(NotSaved(step=step, problem=str(error), retried=False, newest=self._newest))
            return
        if step is not None:
            self._retry_at = step + self.config.retry_every
        if 1 < self._attempt < LAST_ATTEMPTS:  # the first one is reported, and the last one with their number
            return
        failed = NotSaved(step=step, problem=str(error), disk=self._disk(), newest=self._newest)
        self.report(replace(failed, retried=self._attempt < LAST_ATTEMPTS, attempts=max(1, self._attempt)))

    def _disk(self) -> str:
        """Return the free space and the size of a checkpoint: torch does not always say that the disk was full."""
        folder = self.checkpoints.folder.root
        try:
            free, needed = shutil.disk_usage(folder).free, self.checkpoints.size()
        except OSError as error:
            return f"{folder}: {error.strerror}"
        full = "the disk is full: " if free < needed else ""
        takes = f", and a checkpoint takes {needed / 1e9:.3g} GB" if needed else ""
        return f"{full}{free / 1e9:.3g} GB free in {folder}{takes}"
