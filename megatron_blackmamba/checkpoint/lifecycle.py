"""The checkpoints of a run: written in the background, published atomically, verified when read, and pruned.

A checkpoint is written to a hidden folder. When every rank has written and synced its part, rank 0 writes the manifest,
renames the folder, and only then moves `latest`. If the run is killed at any moment, earlier checkpoints are untouched,
and the next save removes the hidden folder. A second checkpoint of a step, as after a rewind, replaces the first, which
comes back if the run is killed in between.

A save may fail on any rank at any moment. No rank raises while others may wait for it: the ranks exchange the outcome
of their parts, and raise the same SaveError together.

A damaged checkpoint is renamed `step_N.damaged` when the run resumes from an earlier one, so that no step on disk is
ahead of the run. It stays until someone deletes it, or until the next damaged checkpoint of that step replaces it.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_blackmamba.checkpoint import common, manifest, safety, sharded
from megatron_blackmamba.checkpoint.agreement import SaveError, found_by_main, together, while_any_moves
from megatron_blackmamba.checkpoint.reading import STATE, find_checkpoint, read_state
from megatron_blackmamba.checkpoint.writing import Part, Write
from megatron_blackmamba.config import RunConfig, to_yaml
from megatron_blackmamba.engine.parts import saving
from megatron_blackmamba.engine.parts.ema import Ema
from megatron_blackmamba.formats import atomic, branches
from megatron_blackmamba.formats.evaluations import is_claimed
from megatron_blackmamba.formats.events import Damaged, Event, NotRemoved, Saved, of_kind, read_events
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.model import LanguageModel
from megatron_blackmamba.runtime.world import World, gathered
from megatron_blackmamba.version import __version__

from megatron.core.optimizer import MegatronOptimizer

REPLACED = ".replaced"
"""Suffix of the hidden name that a checkpoint has while another one of its step takes its place."""


class NotFiniteError(SaveError):
    """A checkpoint that was not written, since a weight or an optimizer state is NaN or infinite."""


class Checkpoints:
    """Every rank has one and calls the same methods in the same order."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        world: World,
        model: LanguageModel,
        optimizer: MegatronOptimizer,
        report: Callable[[Event], None] = lambda event: print(event.sentence),
        alive: Callable[[str], None] = lambda what: None,
        ema: Ema | None = None,
    ):
        """Open the checkpoints; `report` gets events of the run; `alive` is called while long work makes progress."""
        self.folder, self.config, self.world, self.report, self.alive = folder, config, world, report, alive
        self.model, self.optimizer, self.ema = model, optimizer, ema
        self.write: Write | None = None
        self.step_being_written: int | None = None
        self.state_being_written: dict[str, Any] = {}

    def newest(self) -> int | None:
        """Return the step of the newest complete, undamaged checkpoint, or None if there never was a checkpoint.

        Damaged checkpoints are skipped and renamed. If only damaged ones remain, if all are gone, or if reading fails
        for another reason, this raises an error: only the user may decide to start the run over.
        """
        damaged: list[tuple[int, str]] = []
        found_by_main(self.world, self._bring_back)
        steps = self.steps()
        self._look_for_lost(steps)
        for step in reversed(steps):
            try:
                self._check(self.folder.checkpoint(step))
            except manifest.DamagedCheckpoint as error:
                if self.config.checkpoint.if_damaged == "stop":
                    raise manifest.DamagedCheckpoint(
                        f"{error}. Remove that folder to resume from the previous checkpoint,"
                        " or set checkpoint.if_damaged=older."
                    ) from None
                damaged.append((step, str(error)))
                continue
            if damaged:
                self._set_aside(damaged, step)
            return step
        if damaged:
            raise manifest.DamagedCheckpoint(
                f"every checkpoint in {self.folder.checkpoints} is damaged; the newest: {damaged[0][1]}. If the file"
                " system is at fault, try again when it works. To start over, use another run name (name=...) or move"
                " that folder away."
            )
        return None

    def _look_for_lost(self, steps: list[int]) -> None:
        """Report that the last checkpoint is gone; refuse to go on if none is left."""
        last = found_by_main(self.world, lambda: self._last_saved(steps))
        if last is None or last <= max(steps, default=-1):
            return
        gone = f"{self.folder.checkpoint(last)} was saved and is gone"
        if not steps:
            raise manifest.CheckpointError(
                f"{gone}, and no other checkpoint is left. Bring it back, or start over under another run name"
                " (name=...) or after moving the run's folder away."
            )
        self.report(Damaged(step=last, folder="", problem=gone))

    def _last_saved(self, steps: list[int]) -> int | None:
        """Return the step that `latest` names, or without any checkpoint the last one that the events tell of."""
        try:
            named = manifest.step_in_name(Path(self.folder.latest.read_text(encoding="utf-8").strip()))
        except (FileNotFoundError, UnicodeDecodeError):
            named = None
        if named is not None or steps:
            return named
        saved = of_kind([occurrence.event for occurrence in read_events(self.folder.events)], Saved)
        return saved[-1].step if saved else None

    def _move_latest(self, step: int) -> None:
        atomic.write_text(self.folder.latest, self.folder.checkpoint(step).name + "\n")

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints on disk (by name), equal on every rank."""
        return found_by_main(self.world, lambda: sorted(step for step, _ in self._folders()))

    def state(self, step: int) -> dict[str, Any]:
        """Return what `save` was given beside the tensors."""
        state = read_state(self.folder.checkpoint(step), ("config", "progress", "guard", "data"))
        if state["progress"].get("step") != step:
            path = self.folder.checkpoint(step) / STATE
            raise manifest.CheckpointError(f"{path}: refused: it is the state of step {state['progress'].get('step')}")
        return state

    def load(self, step: int) -> None:
        """Load weights and optimizer state of a checkpoint that `newest` has verified."""
        self._load(f"step {step}", self.folder.checkpoint(step), sharded.load)
        if self.world.is_main:
            with suppress(OSError):  # a full disk; the next save moves it
                self._move_latest(step)  # a save that was killed has not

    def load_from(self, checkpoint: Path) -> None:
        """Verify a checkpoint of another run, and load its weights and optimizer state."""
        self._check(checkpoint)
        self._load(str(checkpoint), checkpoint, sharded.load)

    def load_weights(self, path: str | Path) -> None:
        """Load the weights only, from a checkpoint of this or another run, which may be training: `latest` moves."""
        folder = found_by_main(self.world, lambda: find_checkpoint(path))
        self._check(folder)
        self._load(f"the weights of {folder}", folder, sharded.load_weights)

    def _load(self, what: str, folder: Path, load: Callable[..., None]) -> None:
        self.alive(f"loading {what}")
        with saving.each_tensor_read(lambda: self.alive(f"loading {what}")):
            load(folder, self.model, self.optimizer, self.ema)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begin a checkpoint of `step`; `finish` says when it is there. The one before must be finished."""
        self.alive(f"beginning to save step {step}")
        partial = self._partial(step)
        with self._removing_leftovers(step):
            together(self.world, lambda: self._prepare(partial), f"step {step}: prepare")
            tensors, values = sharded.state_to_save(self.model, self.optimizer, self.ema)
            together(self.world, lambda: common.write(partial, values), f"step {step}: begin")
        self.write = sharded.begin_save(partial, self.world, tensors)
        self.write.start()
        self.step_being_written, self.state_being_written = step, state

    def finish(self, wait: bool) -> list[int]:
        """Publish what is written by now, or, waiting, what is being written. Returns the steps published."""
        step = self.step_being_written
        if step is None:
            return []
        assert self.write is not None
        if not wait and self.world.any_rank(self.write.running()):
            return []
        self.step_being_written = None
        with self._removing_leftovers(step):
            parts = self._parts(step, self.write)
            together(self.world, lambda: self._publish(step, parts), f"step {step}: publish")
        if self.world.is_main:
            self._thin_out(step)
        return [step]

    def _prepare(self, partial: Path) -> None:
        self.folder.checkpoints.mkdir(parents=True, exist_ok=True)
        self._bring_back()
        for left_over in self.folder.checkpoints.glob(".step_*"):
            shutil.rmtree(left_over, ignore_errors=True)
        self._refuse_full_disk()
        partial.mkdir()

    def _bring_back(self) -> None:
        atomic.bring_back(self.folder.checkpoints, REPLACED)

    @contextmanager
    def _removing_leftovers(self, step: int) -> Iterator[None]:
        """Remove the files of a save that failed: on a full disk, logs and other runs need their space."""
        try:
            yield
        except SaveError:  # every rank raises it, after every writer has ended
            if self.world.is_main:
                shutil.rmtree(self._partial(step), ignore_errors=True)
            raise

    def _refuse_full_disk(self) -> None:
        if shutil.disk_usage(self.folder.checkpoints).free < self._newest_size():
            raise SaveError("another checkpoint as large as the newest does not fit")

    def _newest_size(self) -> int:
        folders = self._folders()
        return sum(file.stat().st_size for file in max(folders)[1].iterdir()) if folders else 0

    def size(self) -> int:
        """Return the bytes of the newest checkpoint, or of the one last begun on rank 0; 0 if there is neither."""
        return self._newest_size() or (self.write.size() if self.write else 0)

    def _parts(self, step: int, write: Write) -> list[Part]:
        """Wait for every rank's part, and return them on rank 0. If one failed, every rank raises SaveError."""
        mine = while_any_moves(self.world, self.alive, f"saving step {step}", write.wait)
        ends = list(enumerate(gathered((mine.not_finite, mine.problem))))
        for rank, (not_finite, _) in ends:
            if not_finite is not None:
                raise NotFiniteError(f"step {step}: {not_finite} is not finite on rank {rank}")
        for rank, (_, problem) in ends:
            if problem is not None:
                raise SaveError(f"step {step}: rank {rank}: {problem}")
        parts: list[Any] = [None] * self.world.size
        dist.gather_object(mine, parts if self.world.is_main else None, dst=0)
        return parts

    def _publish(self, step: int, parts: list[Part]) -> None:
        partial, final = self._partial(step), self.folder.checkpoint(step)
        assert self.write is not None
        self.write.write_table(parts)
        atomic.write_json(partial / STATE, self.state_being_written)
        atomic.write_text(partial / "config.yaml", to_yaml(self.config))
        if self.folder.tokenizer.is_file():
            atomic.write_bytes(partial / "tokenizer.json", self.folder.tokenizer.read_bytes())
        manifest.write(partial, step, self._entries(partial, parts), self._facts())
        # It was published before if the run has gone back to it, or if `latest` could not be moved then.
        with atomic.replaced(final, partial.with_name(partial.name + REPLACED)):
            os.rename(partial, final)
            atomic.sync_folder(self.folder.checkpoints)
        self._move_latest(step)

    def _entries(self, partial: Path, parts: list[Part]) -> dict[str, dict[str, Any]]:
        """Return the manifest's entries: the shards as their ranks read them back, and rank 0's own files."""
        shards = {name: entry for part in parts for name, entry in part.files.items()}
        for name, entry in shards.items():
            if (partial / name).stat().st_size != entry["bytes"]:
                raise SaveError(f"{partial / name} changed while the checkpoint was being written")
        small = [name for name in manifest.SMALL if name in manifest.REQUIRED or (partial / name).exists()]
        return shards | {name: manifest.describe(partial / name) for name in small}

    def _facts(self) -> dict[str, Any]:
        facts = {"version": __version__, "torch": torch.__version__, "world_size": self.world.size}
        return {**facts, "parallel": self.world.parallel.model_dump()}

    def _thin_out(self, newest: int) -> None:
        """Remove the checkpoints before `newest` that the config does not keep."""
        settings = self.config.checkpoint
        with self._reporting():  # the new one is published all the same
            behind = sorted(found for found in self._folders() if found[0] <= newest)
            needed = branches.needed_steps(self.folder)
            for step, path in behind[: -settings.keep_last]:
                with self._reporting():  # others need not stay for one that must
                    kept = settings.is_kept(step) or step in needed
                    if not kept and not is_claimed(self.folder.root, step):
                        gone = path.with_name(f".{path.name}.removed")  # hidden, so the next save removes it too
                        os.rename(path, gone)  # whole or hidden, whatever happens meanwhile
                        shutil.rmtree(gone)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.report(NotRemoved(problem=str(error)))

    def _set_aside(self, damaged: list[tuple[int, str]], step: int) -> None:
        """Return to `step` and rename the damaged checkpoints after it.

        `latest` moves first: after a kill in between, the next start finds the damaged checkpoints again.
        """

        def rename() -> None:
            self._move_latest(step)
            for number, _ in damaged:
                folder = self.folder.checkpoint(number)
                aside = folder.with_name(f"{folder.name}.damaged")
                if aside.exists():
                    shutil.rmtree(aside)
                os.rename(folder, aside)

        for number, problem in damaged:
            aside = f"{self.folder.checkpoint(number).name}.damaged"
            self.report(Damaged(step=number, folder=aside, problem=problem))
        together(self.world, rename, "set damaged checkpoints aside")

    def _folders(self) -> list[tuple[int, Path]]:
        """Step and folder of every checkpoint; a folder that cannot be listed is an error, not an empty one."""
        try:
            paths = list(self.folder.checkpoints.iterdir())
        except FileNotFoundError:
            return []
        return [
            (step, path)
            for path in paths
            if (step := manifest.step_in_name(path)) is not None
            and path == self.folder.checkpoint(step)
            and path.is_dir()
        ]

    def _partial(self, step: int) -> Path:
        final = self.folder.checkpoint(step)
        return final.with_name(f".{final.name}")

    def _check(self, folder: Path) -> None:
        """Verify a checkpoint, the ranks sharing the reading; what one finds, all raise. Damage says the most."""
        rank, ranks, problem = self.world.rank, self.world.size, None

        def verify(moved: Callable[[], None]) -> dict[str, Any]:
            return manifest.verify(folder, rank, ranks, moved)

        try:
            content = while_any_moves(self.world, self.alive, f"verifying {folder}", verify)
            if self.world.is_main:
                safety.refuse_code(folder, content["files"])
        except manifest.CheckpointError as error:
            problem = error
        problems = [found for found in gathered(problem) if found is not None]
        for found in sorted(problems, key=lambda found: not isinstance(found, manifest.DamagedCheckpoint)):
            raise found
