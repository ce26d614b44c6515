"""Two ranks that save again and again while every operation of a save fails in turn."""

import gc
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from megatron_blackmamba import model
from megatron_blackmamba.checkpoint import Checkpoints, manifest, safety, sharded, writing
from megatron_blackmamba.checkpoint.agreement import found_by_main
from megatron_blackmamba.config import load
from megatron_blackmamba.formats.events import Event
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.runtime import world
from megatron_blackmamba.training.keep.saving import Saver
from megatron_blackmamba.training.step.optimizer import make_trainable
from tests.checkpoint.disk_faults import Disk
from tests.runtime.ranks import fork_ranks

from megatron.core.dist_checkpointing.dict_utils import nested_values

SMALL = [
    *("parallel.expert=2", "model.pattern=ME", "model.hidden_size=32", "model.expert_hidden_size=32"),
    *("model.experts=2", "model.vocab_size=64", "checkpoint.keep_every=0", "checkpoint.keep_last=2"),
]
FAULTS = {"refused": "crsnCRS", "full": "csCS", "removed": "nCSR", "killed": "CSR", "no memory": ""}
"""How an operation fails, and the kinds of operations that do. Memory lacks before the first of them."""


class Rank:
    """One rank with a real model, optimizer, Checkpoints and Saver, on a disk that fails on demand."""

    def __init__(self, folder: Path) -> None:
        config = load("tiny", [f"folder={folder}", "name=run", *SMALL])
        self.place = world.start(config.parallel)
        self.run, self.said, self.step = RunFolder(folder / "run"), [], 0
        trainable = make_trainable(config, model.build(config, self.place), self.place)
        trainable.optimizer.step()
        state = {"config": {}, "progress": {}, "guard": {}, "data": {}}
        parts = trainable.model, trainable.optimizer
        self.checkpoints = Checkpoints(self.run, config, self.place, *parts, self.say)
        self.saver = Saver(config.checkpoint.model_copy(update={"every": 1}), self.checkpoints, lambda: state, self.say)
        self.disk = Disk(self.run.checkpoints)
        gc.freeze()

    def say(self, event: Event) -> None:
        self.said.append(event.sentence)

    def save(self, victim: int = 0, number: int = 0, how: str = "") -> dict:
        """Save as the training loop does, with one fault; return what was said and what is on disk."""
        self.step += 1
        self.said.clear()
        self.disk.arm(number if self.place.rank == victim else 0, how)
        self.saver.after_step(self.step)
        self.saver.wait()
        kinds = self.disk.kinds()
        self.disk.arm(0, "")
        steps = self.checkpoints.steps()
        whole = steps
        if self.place.is_main:
            whole = [manifest.verify(self.run.checkpoint(step))["step"] for step in steps]
        dist.barrier()
        return {"step": self.step, "said": list(self.said), "steps": whole, "kinds": kinds}

    def every_fault(self) -> list[dict]:
        for _ in range(3):  # until old checkpoints are removed as well
            usual = self.save()
        kinds = [None] * self.place.size
        dist.all_gather_object(kinds, usual["kinds"])
        ends = []
        for how, which in FAULTS.items():
            self.save()  # or, after "removed", there would be no checkpoint, and fewer operations before the writer's
            for victim, operations in enumerate(kinds):
                for number, kind in enumerate(operations, start=1):
                    if kind in which:
                        ends.append({"fault": [how, victim, number, kind], **self.save(victim, number, how)})
        for victim in range(self.place.size):
            ends.append({"fault": ["no memory", victim, 0, ""], **self.save_without_memory(victim)})
        return ends

    def save_without_memory(self, victim: int) -> dict:
        """Save while one rank has no memory for a copy of its tensors."""
        real = writing._staged
        if self.place.rank == victim:
            writing._staged = refuse(RuntimeError("not enough memory"))
        try:
            return self.save()
        finally:
            writing._staged = real

    def refusal(self) -> str:
        """Return what this rank says where rank 0 may not read a folder."""
        try:
            found_by_main(self.place, refuse(PermissionError("Permission denied")))
        except OSError as error:
            return str(error)
        return ""

    def full_file_system(self) -> list[dict]:
        """Save with less and less free space on a file system of its own, which fills up while the save writes."""
        self.checkpoints._refuse_full_disk = lambda: None  # as if another program took the space meanwhile
        saved = self.save()["steps"][-1]
        used = sum(file.stat().st_size for file in self.run.checkpoint(saved).iterdir())
        ends = []
        for left in (used * 2, used - 4096, *(used * eighths // 8 for eighths in range(7, -1, -1))):
            dist.barrier()
            ballast = self.run.root / "ballast"
            if self.place.is_main:
                free = shutil.disk_usage(self.run.root).free
                with open(ballast, "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, free - left)
            dist.barrier()
            ends.append(self.save())
            if self.place.is_main:
                ballast.unlink()
        return ends

    def elements(self) -> dict[str, int]:
        """Return the elements of the optimizer's state: this rank's to save, to load, and those of the checkpoint."""
        tensors = {
            "to save": sharded.state_to_save(self.checkpoints.model, self.checkpoints.optimizer)[0],
            "to load": sharded._state(self.checkpoints.model, self.checkpoints.optimizer, is_loading=True),
        }
        counts = {
            name: sum(entry.data.numel() for entry in nested_values(state) if "optimizer." in getattr(entry, "key", ""))
            for name, state in tensors.items()
        }
        table = safety.read_table(self.run.checkpoint(self.step)).state_dict_metadata
        return {**counts, "all": sum(entry.size.numel() for name, entry in table.items() if "optimizer." in name)}


def refuse(error: Exception) -> Callable:
    """Return a function that raises an error."""

    def refusing(*_):
        raise error

    return refusing


def body(folder: Path) -> None:
    rank = Rank(folder)
    ends = rank.every_fault()
    full = rank.full_file_system() if os.path.ismount(folder) else []
    last = rank.save()
    last["newest"] = rank.checkpoints.newest()
    last["refusal"] = rank.refusal()
    last["elements"] = rank.elements()
    rank.checkpoints.load(last["newest"])
    world.shutdown()
    (folder / f"rank_{rank.place.rank}.json").write_text(json.dumps([*ends, last]))
    (folder / f"full_{rank.place.rank}.json").write_text(json.dumps(full))


if __name__ == "__main__":
    where = Path(sys.argv[1])
    failed = [answer for answer in fork_ranks(2, lambda: body(where)) if "error" in answer]
    seen = {
        name: [] if failed else [json.loads((where / f"{name}_{number}.json").read_bytes()) for number in (0, 1)]
        for name in ("rank", "full")
    }
    print(json.dumps({"failed": failed, "ranks": seen["rank"], "full": seen["full"]}))
