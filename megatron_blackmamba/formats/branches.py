"""The branches of a run: a small file for each, which keeps the checkpoint it begins at until it has one of its own."""

import hashlib
import json
from pathlib import Path

from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.run_folder import RunFolder


def protect(checkpoint: Path, step: int, branch: RunFolder) -> bool:
    """Note in the trunk's folder that a branch begins at this checkpoint; return whether that could be written."""
    trunk = RunFolder(checkpoint.parent.parent)
    if trunk.checkpoint(step) != checkpoint:  # a copy, which no run deletes
        return True
    root = branch.root.resolve()
    try:
        trunk.branches.mkdir(exist_ok=True)
        place = hashlib.blake2b(str(root).encode(), digest_size=4).hexdigest()
        atomic.write_json(trunk.branches / f"{root.name}-{place}.json", {"run": str(root), "step": step})
    except OSError:
        return False
    return True


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
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found
