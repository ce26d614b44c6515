"""All that keeps a run, as one: its locked folder with the checkpoints, the exports, the records and the markers."""

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_blackmamba.checkpoint import Checkpoints
from megatron_blackmamba.checkpoint.reading import eod_id, saved_config
from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.data import DataPlan
from megatron_blackmamba.formats import atomic, branches
from megatron_blackmamba.formats.events import Event, LoggingProblem, Saved
from megatron_blackmamba.formats.mixture import Mixture
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.runtime.world import World
from megatron_blackmamba.training.keep.background import Background
from megatron_blackmamba.training.keep.export_checks import ExportChecks
from megatron_blackmamba.training.keep.exporting import Exporter
from megatron_blackmamba.training.keep.lock import Lock
from megatron_blackmamba.training.keep.records import contents
from megatron_blackmamba.training.keep.saving import Saver
from megatron_blackmamba.training.keep.scores import Scores
from megatron_blackmamba.training.step.optimizer import Trainable
from megatron_blackmamba.version import __version__

PAUSE_SECONDS = 0.5


class Keeper:
    """The folder of a run, locked. Every rank has one and calls the same methods in the same order."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        trainable: Trainable,
        state: Callable[[], dict[str, Any]],
        report: Callable[[Event], None],
        alive: Callable[[str], None],
        mixture: Mixture | None = None,
    ) -> None:
        """Lock the folder.

        Args:
            state: Returns what a checkpoint holds beside tensors.
            alive: For a watchdog.
            mixture: The data that a branch composed, for its folder.
        """
        self.folder = folder = RunFolder.of(config)
        self._config, self._world, self._model = config, world, trainable.model
        self._run_state, self._report, self._alive = state, report, alive
        self._mixture = mixture
        self._records: dict[Path, bytes] = {}
        self._ema, parts = trainable.ema, (trainable.model, trainable.optimizer)
        self._checkpoints = Checkpoints(folder, config, world, *parts, report, alive, trainable.ema)
        self._saver = Saver(config.checkpoint, self._checkpoints, self._state, self._report_save)
        checks = ExportChecks(config.checkpoint.export_check if world.is_main else "none", folder, report)
        self._scores = Scores(config.evaluation, folder, report) if world.is_main and config.evaluation.every else None
        self._beside: list[Background] = [checks, self._scores] if self._scores else [checks]
        every = config.checkpoint.export_every
        self._exporter = Exporter(every, self._export, self._is_exported, report, checks)
        if world.is_main:
            folder.refuse_obstacles()
        self._lock = Lock(folder.lock) if world.is_main else None

    def newest(self) -> int | None:
        """Return the step of the newest good checkpoint."""
        return self._checkpoints.newest()

    def saved(self, step: int) -> tuple[RunConfig, dict[str, Any]]:
        """Return the config of a checkpoint, and what it holds beside tensors."""
        state = self._checkpoints.state(step)
        return saved_config(self.folder.checkpoint(step), state), state

    def load(self, step: int) -> None:
        """Load the weights and the optimizer's state of a checkpoint of this run."""
        self._checkpoints.load(step)
        self._saver.resumed_at(step)
        if self._scores:
            self._scores.resumed_at(step)

    def load_weights(self, path: str | Path) -> None:
        """Load the weights of a checkpoint of any run."""
        self._checkpoints.load_weights(path)

    def load_from(self, checkpoint: Path, step: int) -> bool:
        """Load all of another run's checkpoint. Return whether that run keeps it until this one has one of its own."""
        protected = not self._world.is_main or branches.protect(checkpoint, step, self.folder)
        try:
            self._checkpoints.load_from(checkpoint)
        except BaseException:
            if self._world.is_main:
                branches.release(checkpoint, self.folder)
            raise
        return protected

    def begin(self, data: DataPlan) -> None:
        """Note in the folder that the run goes on, with which config and data."""
        if self._lock:
            for marker in (self.folder.requeue, self.folder.done, self.folder.failed):
                marker.unlink(missing_ok=True)
            self._records = contents(self.folder, self._config, data, self._mixture)
            for path, content in self._records.items():  # over those of an earlier start
                atomic.write_bytes(path, content)

    def after_step(self, step: int, good: bool = True) -> None:
        """Save and export what is due. What is due at a bad step waits for the next good one."""
        if self._lock and self._lock.lost:  # before another job takes the folder's name
            self._restore_records()
        for each in (self._saver, self._exporter):
            (each.after_step if good else each.postpone)(step)
        if self._scores:
            self._scores.poll()

    def settled(self) -> int | None:
        """Finish the save under way, and return the newest checkpoint."""
        return self._saver.settled()

    def last(self, step: int, wanted: bool) -> bool:
        """Finish the save under way, then save the last step of this job if wanted; return whether it is on disk.

        Checks and scores no longer yield from here on.
        """
        self._saver.wait()
        saved = wanted and (step == 0 or self._saver.last(step))
        for each in self._beside:
            each.hurry()
        return saved

    @property
    def another_start_may_save(self) -> bool:
        """Return whether it was the disk that refused the last step, not the weights."""
        return self._saver.last_failed

    def export_last(self, step: int) -> None:
        """Export the last step of the run if it is not, and have its checkpoint scored."""
        self._exporter.last(step)
        if self._scores is not None:
            self._scores.saved(step, last=True)

    def mark(self, done: bool, requeue: bool) -> None:
        """Leave the marker that scripts decide by: an empty file can be made on a full disk too."""
        if self._world.is_main and (done or requeue):
            (self.folder.done if done else self.folder.requeue).touch()

    def finish(self, asked: Callable[[], bool]) -> None:
        """Wait until exports are checked and checkpoints scored, or a rank is asked to stop. Every rank calls this."""
        while True:
            busy = [each.busy for each in self._beside]  # each of them, since to ask is what drives them
            if not self._world.any_rank(any(busy)):
                break
            self._alive("checking exports and scoring checkpoints")
            if self._world.any_rank(asked()):
                break
            time.sleep(PAUSE_SECONDS)
        self.close()

    def close(self) -> None:
        """Drop the checks and scores that are under way or wait."""
        for each in self._beside:
            each.stop()

    def unlock(self, leave_no_trace: bool = False) -> None:
        """Let other jobs train in the folder, and remove it if it was made for a run that is refused."""
        if self._lock:
            self._lock.discard() if leave_no_trace else self._lock.release()

    def _state(self) -> dict[str, Any]:
        self._restore_records()
        return self._run_state()

    def _restore_records(self) -> None:
        """Write again what was removed. Raise RunInUse if another job has taken the folder since the lock was."""
        names = []
        with contextlib.suppress(OSError):  # a full disk: the next save tries again
            if self._records and self._lock and self._lock.restore():
                names.append(self._lock.path.name)
            for path in [path for path in self._records if not path.exists()]:
                atomic.write_bytes(path, self._records[path])
                names.append(path.name)
        if names:
            removed = f"{self.folder.root}: {', '.join(names)} had been removed and is written again"
            self._report(LoggingProblem(problem=removed))

    def _report_save(self, event: Event) -> None:
        self._report(event)
        if self._scores and isinstance(event, Saved):
            self._scores.saved(event.step or 0)

    def _export(self, step: int) -> None:
        """Write the weights as they are as a Hugging Face model, every rank its part."""
        from megatron_blackmamba.interchange import live, megatron

        alive = partial(self._alive, f"exporting step {step}")
        alive()
        state, folder = self._state(), self.folder
        averaged = self._ema is not None and self._config.checkpoint.export_ema
        with self._ema.in_place() if self._ema and averaged else contextlib.nullcontext():
            live.export(
                self._model,
                self._world,
                folder.export(step),
                alive,
                source=f"{'the averaged weights of ' if averaged else ''}step {step} of {folder.root}",
                tokenizer=folder.tokenizer if folder.tokenizer.is_file() else None,
                eod_id=eod_id(state),
                sequence_length=self._config.data.sequence_length,
                past=lambda: megatron.past(self._config, state, step, folder, __version__, averaged),
            )

    def _is_exported(self, step: int) -> bool:
        return self._world.any_rank(self._world.is_main and self.folder.export(step).exists())
