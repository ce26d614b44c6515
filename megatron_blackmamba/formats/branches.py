"""The branches of a run: where they begin, and what keeps the checkpoint there until they have one of their own.

A trunk holds a small file for each of its branches. A branch says in its events where it began.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.events import Branched, read_events
from megatron_blackmamba.formats.run_folder import RunFolder


@dataclass(frozen=True)
class Trunk:
    """The run that another one branches from, and where."""

    run: RunFolder
    """Its folder, which may be gone."""
    step: int
    sample: int
    """Position in the data of the branch's first sample."""
    consumed_samples: int
    """In sequences of the branch's length."""
    relength: bool
    """The branch has another sequence length, and therefore a numbering of samples of its own."""

    @property
    def is_there(self) -> bool:
        return self.run.metrics.is_file()


def trunk_of(run: RunFolder) -> Trunk | None:
    """Return what a run branches from; None if it began by itself."""
    found = [each.event for each in read_events(run.events) if isinstance(each.event, Branched)]
    if not found:
        return None
    begun = found[-1]
    root = Path(begun.trunk).parent.parent
    beside = run.root.resolve().parent / root.name  # where it is if both were moved together
    root = beside if not root.is_dir() and beside.is_dir() else root
    return Trunk(RunFolder(root), begun.step or 0, begun.sample, begun.consumed_samples, begun.relength)


def trunks_of(run: RunFolder) -> Iterator[Trunk]:
    """Yield the trunk of a run, the trunk's trunk and so on, as far as they are there."""
    seen = {run.root.resolve()}
    while (trunk := trunk_of(run)) and trunk.is_there and trunk.run.root.resolve() not in seen:
        yield trunk
        run = trunk.run
        seen.add(run.root.resolve())


def split(spec: str, folder: Path = Path()) -> tuple[str, int | None]:
    """Return the path and the step of RUN or RUN@STEP."""
    path, at, step = spec.rpartition("@")
    return (path, int(step)) if at and step.isdecimal() and not (folder / spec).exists() else (spec, None)


def absolute(spec: str, folder: Path = Path()) -> str:
    """Return RUN or RUN@STEP, or any path, relative to a folder, with an absolute path if something is there."""
    path, step = split(spec, folder)
    if not (folder / path).exists():
        return spec
    return str((folder / path).resolve()) + ("" if step is None else f"@{step}")


def place_of(checkpoint: Path, step: int) -> str:
    """Return the RUN@STEP that names a checkpoint from any folder, or its own path if it is a copy outside a run."""
    checkpoint = checkpoint.resolve()
    run = RunFolder(checkpoint.parent.parent)
    return f"{run.root}@{step}" if run.checkpoint(step) == checkpoint else str(checkpoint)


def protect(checkpoint: Path, step: int, branch: RunFolder) -> bool:
    """Note in the trunk's folder that a branch begins at this checkpoint; return whether that could be written."""
    trunk = RunFolder(checkpoint.parent.parent)
    if trunk.checkpoint(step) != checkpoint:  # a copy, which no run deletes
        return True
    root = branch.root.resolve()
    try:
        trunk.branches.mkdir(exist_ok=True)
        atomic.write_json(_note(trunk, root), {"run": str(root), "step": step})
    except OSError:
        return False
    return True


def release(checkpoint: Path, branch: RunFolder) -> None:
    """Remove the note of a branch that was refused."""
    trunk = RunFolder(checkpoint.parent.parent)
    try:
        _note(trunk, branch.root.resolve()).unlink(missing_ok=True)
        trunk.branches.rmdir()
    except OSError:  # other branches, or a folder that is not ours
        return


def needed_steps(trunk: RunFolder) -> set[int]:
    """Return the steps at which branches begin that have no checkpoint of their own yet."""
    return {step for run, step in branches_of(trunk) if run.is_dir() and not RunFolder(run).latest.is_file()}


def branches_of(trunk: RunFolder) -> list[tuple[Path, int]]:
    """Return the runs that branch from a run, as their folders, with the steps at which they do."""
    found = []
    for path in sorted(trunk.branches.glob("*.json")):
        try:
            content = json.loads(path.read_bytes())
            found.append((Path(content["run"]), int(content["step"])))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return found


def _note(trunk: RunFolder, branch: Path) -> Path:
    place = hashlib.blake2b(str(branch).encode(), digest_size=4).hexdigest()
    return trunk.branches / f"{branch.name}-{place}.json"
