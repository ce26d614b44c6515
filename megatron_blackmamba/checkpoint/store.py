"""The checkpoints of a run: written beside training, published whole, verified when found, thinned out.

A checkpoint is written to a hidden folder. When every rank has written and synced its part, each describes its own
files, rank 0 writes the manifest, renames the folder, and only then moves `latest`. A kill at any moment leaves the
checkpoints before it untouched and a hidden folder that the next save sweeps away.

A damaged checkpoint is renamed `step_N.damaged` when the run goes on from one before it, so that no number on disk is
above the run's own. Nothing deletes it but a person.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_blackmamba import __version__
from megatron_blackmamba.checkpoint import common, manifest, safety, sharded
from megatron_blackmamba.checkpoint.reading import STATE, find_checkpoint
from megatron_blackmamba.config import RunConfig, to_yaml
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.model import LanguageModel
from megatron_blackmamba.runtime import device
from megatron_blackmamba.runtime.world import World

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # isort: skip
from megatron.core.optimizer import MegatronOptimizer  # isort: skip


NAME = re.compile(r"step_(\d+)")


class SaveError(OSError):
    """A checkpoint could not be written; the ones before it are as they were."""


class Checkpoints:
    """Every rank has one and calls the same methods in the same order."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        world: World,
        model: LanguageModel,
        optimizer: MegatronOptimizer,
        say: Callable[[str], None] = print,
        alive: Callable[[str], None] = lambda what: None,
    ):
        """say: what people should know; alive: told before anything long, for a watchdog."""
        self.folder, self.config, self.world, self.say, self.alive = folder, config, world, say, alive
        self.model, self.optimizer = model, optimizer
        self.writing = AsyncCallsQueue()
        self.step_being_written: int | None = None
        self.state_being_written: dict[str, Any] = {}

    def newest(self) -> int | None:
        """The newest checkpoint that is complete and undamaged; None if none was ever there.

        Damaged ones are passed over and set aside. Where nothing is left, or one cannot be read for another reason than
        its content, it raises: only a person may decide that a run starts over.
        """
        damaged: list[tuple[int, str]] = []
        for step in reversed(self.steps()):
            try:
                self._check(self.folder.checkpoint(step))
            except manifest.DamagedCheckpoint as error:
                if self.config.checkpoint.if_damaged == "stop":
                    raise manifest.DamagedCheckpoint(
                        f"{error}. Remove that folder to go on from the checkpoint before it,"
                        " or set checkpoint.if_damaged=older."
                    ) from None
                damaged.append((step, str(error)))
                continue
            if damaged:
                self._set_aside(damaged, step)
            return step
        if damaged:
            raise manifest.DamagedCheckpoint(
                f"every checkpoint in {self.folder.checkpoints} is damaged; of the newest: {damaged[0][1]}. If the file"
                " system is at fault, start again when it is well. To begin anew, name another run (name=...) or move"
                " that folder away."
            )
        return None

    def steps(self) -> list[int]:
        """Steps of the checkpoints on disk, complete by their name; the same on every rank."""
        found = [sorted(step for step, _ in self._folders())] if self.world.is_main else [None]
        dist.broadcast_object_list(found, src=0)
        return found[0] or []

    def state(self, step: int) -> dict[str, Any]:
        """What `save` was given beside the tensors."""
        return json.loads((self.folder.checkpoint(step) / STATE).read_bytes())

    def load(self, step: int) -> None:
        """Weights and optimizer state; `newest` has verified them."""
        self.alive(f"loading step {step}")
        sharded.load(self.folder.checkpoint(step), self.model, self.optimizer)

    def load_weights(self, path: str | Path) -> None:
        """Weights alone, from a checkpoint of this or another run."""
        folder = find_checkpoint(path)
        self._check(folder)
        self.alive(f"loading the weights of {folder}")
        sharded.load_weights(folder, self.model, self.optimizer)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begin a checkpoint of `step`; `finish` says when it is there. The one before must be finished."""
        self.alive(f"beginning to save step {step}")
        partial = self._partial(step)
        self._together(lambda: self._prepare(partial), "prepare")
        tensors, values = sharded.state_to_save(self.model, self.optimizer)
        self._together(lambda: common.write(partial, values), "begin")
        request = sharded.begin_save(partial, self.world, tensors)
        self.writing.schedule_async_request(request)
        self.step_being_written, self.state_being_written = step, state

    def finish(self, wait: bool) -> list[int]:
        """Publish what is written by now, or, waiting, what is being written. Returns the steps published."""
        step = self.step_being_written
        if step is None:
            return []
        if wait:
            self.alive(f"saving step {step}")
        try:
            if not self.writing.maybe_finalize_async_calls(blocking=wait):
                return []
        except (Exception, CheckpointException) as error:  # every rank gets torch's, which is no Exception
            self.step_being_written = None
            raise SaveError(f"step {step}: {_reason(error)}") from error
        self.step_being_written = None
        partial = self._partial(step)
        files = self._described(partial)
        self._together(lambda: self._publish(partial, step, files), f"publish step {step}")
        return [step]

    def _prepare(self, partial: Path) -> None:
        self.folder.checkpoints.mkdir(parents=True, exist_ok=True)
        for left_over in self.folder.checkpoints.glob(".step_*"):
            shutil.rmtree(left_over)
        self._refuse_full_disk()
        partial.mkdir()

    def _refuse_full_disk(self) -> None:
        free = shutil.disk_usage(self.folder.checkpoints).free
        folders = self._folders()
        needed = sum(file.stat().st_size for file in max(folders)[1].iterdir()) if folders else 0
        if free < needed:
            raise SaveError(
                f"{self.folder.checkpoints}: {free / 2**30:.1f} GiB free, a checkpoint takes {needed / 2**30:.1f} GiB"
            )

    def _described(self, partial: Path) -> dict[str, dict[str, Any]]:
        """Every rank reads back what it wrote; rank 0 the rest. What one cannot read, all raise as SaveError."""
        mine: dict[str, dict[str, Any]] = {}
        failed = None
        try:
            for path in partial.iterdir():
                if _written_by(path.name) == self.world.rank:
                    mine[path.name] = manifest.describe(path)
        except OSError as error:
            failed = f"reading back {partial.name} on rank {self.world.rank}: {_reason(error)}"
        parts = self._gathered((mine, failed))
        for _, failed in parts:
            if failed is not None:
                raise SaveError(failed)
        return {name: entry for files, _ in parts for name, entry in files.items()}

    def _publish(self, partial: Path, step: int, files: dict[str, dict[str, Any]]) -> None:
        atomic.write_json(partial / STATE, self.state_being_written)
        atomic.write_text(partial / "config.yaml", to_yaml(self.config))
        if self.folder.tokenizer.is_file():
            atomic.write_bytes(partial / "tokenizer.json", self.folder.tokenizer.read_bytes())
        files |= {path.name: manifest.describe(path) for path in partial.iterdir() if path.name not in files}
        facts = {"version": __version__, "torch": torch.__version__, "world_size": self.world.size}
        manifest.write(partial, step, files, {**facts, "parallel": self.world.parallel.model_dump()})
        final = self.folder.checkpoint(step)
        if final.exists():  # published, but then `latest` could not be moved
            shutil.rmtree(final)
        os.rename(partial, final)
        atomic.sync_folder(self.folder.checkpoints)
        atomic.write_text(self.folder.latest, final.name + "\n")
        self._thin_out(step)

    def _thin_out(self, newest: int) -> None:
        """Of what lies behind the checkpoint just published, keep as many as the config says."""
        settings = self.config.checkpoint
        behind = sorted(found for found in self._folders() if found[0] <= newest)
        for step, path in behind[: -settings.keep_last]:
            if not settings.keep_every or step % settings.keep_every:
                shutil.rmtree(path)

    def _set_aside(self, damaged: list[tuple[int, str]], step: int) -> None:
        """Go back to `step`, past the damaged ones. `latest` first: a kill in between, and they are found again."""

        def rename() -> None:
            atomic.write_text(self.folder.latest, self.folder.checkpoint(step).name + "\n")
            for number, _ in damaged:
                folder = self.folder.checkpoint(number)
                aside = folder.with_name(f"{folder.name}.damaged")
                if aside.exists():
                    shutil.rmtree(aside)
                os.rename(folder, aside)

        for number, problem in damaged:
            self.say(f"passes over a damaged checkpoint, now {self.folder.checkpoint(number).name}.damaged: {problem}")
        self._together(rename, "set damaged checkpoints aside")

    def _folders(self) -> list[tuple[int, Path]]:
        """Step and folder of every checkpoint; a folder that cannot be listed is an error, not an empty one."""
        try:
            paths = list(self.folder.checkpoints.iterdir())
        except FileNotFoundError:
            return []
        return [(int(name[1]), path) for path in paths if (name := NAME.fullmatch(path.name))]

    def _partial(self, step: int) -> Path:
        final = self.folder.checkpoint(step)
        return final.with_name(f".{final.name}")

    def _check(self, folder: Path) -> None:
        """Verify a checkpoint, the ranks sharing the reading; what one finds, all raise. Damage says the most."""
        self.alive(f"verifying {folder}")
        problem = None
        try:
            manifest.verify(folder, self.world.rank, self.world.size)
            if self.world.is_main:
                safety.refuse_code(folder)
        except manifest.CheckpointError as error:
            problem = error
        problems = [found for found in self._gathered(problem) if found is not None]
        for found in sorted(problems, key=lambda found: not isinstance(found, manifest.DamagedCheckpoint)):
            raise found

    def _gathered(self, value: Any) -> list[Any]:
        """What every rank gave."""
        values = [None] * self.world.size
        dist.all_gather_object(values, value)
        return values

    def _together(self, on_main: Callable[[], None], what: str) -> None:
        """Have rank 0 do it; if that fails, every rank raises SaveError."""
        failed: list[str | None] = [None]
        if self.world.is_main:
            try:
                on_main()
            except OSError as error:
                failed[0] = f"{what}: {_reason(error)}"
        dist.broadcast_object_list(failed, src=0, device=device.device())
        if failed[0] is not None:
            raise SaveError(failed[0])


def _written_by(name: str) -> int:
    """The rank that wrote a file: torch names shards `__RANK_PART.distcp`; the rest is rank 0's."""
    return int(name.split("_")[2]) if name.startswith("__") else 0


def _reason(error: BaseException) -> str:
    """The innermost cause, in one line; of several writers' failures, the first."""
    if isinstance(error, CheckpointException):
        failures = list(error.failures.values())
        error = failures[0][0] if failures else RuntimeError("other ranks could not write")
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
