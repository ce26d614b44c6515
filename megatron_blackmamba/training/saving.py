"""When checkpoints are written, and what happens when one cannot be: the one before stays, and it is tried again."""

import shutil
import time
from collections.abc import Callable
from typing import Any

from megatron_blackmamba.checkpoint import Checkpoints, SaveError
from megatron_blackmamba.config.run import CheckpointConfig

State = Callable[[], dict[str, Any]]
LAST_ATTEMPTS = 6
LAST_PAUSE_SECONDS = 5.0


class Saver:
    """Saves every so many steps while training goes on, and once more at the end."""

    def __init__(
        self, config: CheckpointConfig, checkpoints: Checkpoints, state: State, report: Callable[[str], None]
    ) -> None:
        self.config, self.checkpoints, self.state, self.report = config, checkpoints, state, report
        self._begun: int | None = None
        self._retry_at: int | None = None

    def resumed_at(self, step: int) -> None:
        """This step is on disk already."""
        self._begun = step

    def after_step(self, step: int) -> None:
        """Begin a save if one is due; look after the one that is being written."""
        self._finish(step, wait=False)
        if step == self._retry_at or (self.config.every and step % self.config.every == 0):
            self._begin(step)
            self._finish(step, wait=not self.config.asynchronous)

    def last(self, step: int) -> bool:
        """Save `step` and wait until it is on disk, trying for a while if the disk is full; False if it never was."""
        for attempt in range(LAST_ATTEMPTS):
            if attempt:
                time.sleep(LAST_PAUSE_SECONDS)
            if self._begun != step:
                self._begin(step)
            self._finish(step, wait=True)
            if self._begun == step:
                return True
        return False

    def wait(self) -> None:
        """For what is being written, if anything."""
        self._finish(None, wait=True)

    def settled(self) -> int | None:
        """The newest checkpoint to go back to, what is being written included."""
        self.wait()
        return self.checkpoints.newest()

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
                self.report(f"saved step {saved}")
        except SaveError as error:
            self._failed(step, error)

    def _failed(self, step: int | None, error: SaveError) -> None:
        self._begun = None
        if step is not None:
            self._retry_at = step + self.config.retry_every
        folder = self.checkpoints.folder.root
        free = shutil.disk_usage(folder).free / 1e9  # torch does not always say that the disk was full
        self.report(
            f"a checkpoint could not be saved ({error}; {free:.3g} GB free in {folder});"
            " the one before stays, and it is tried again"
        )
