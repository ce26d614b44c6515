"""The folder of a run: the paths of all its files, for code that writes them and code that reads them."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_blackmamba.settings import RunConfig

MANIFEST = "manifest.json"
"""The last file of a checkpoint to be written; a folder with it is one."""
WAITING = ".waiting"
"""End of the name of an empty file: lines of the file beside it wait in memory, as on a full disk."""


class RunFolderError(ValueError):
    """A run folder in which no run can write."""


class Inside:
    """The path of a file or folder inside a folder: that of a run, or the one that `of` names."""

    def __init__(self, name: str, of: str = "root") -> None:
        self.name, self.of = name, of

    def __get__(self, owner: Any, _: type) -> Path:
        return getattr(owner, self.of) / self.name


def near(path: Path) -> str:
    """Return the folder that was probably meant instead of a missing one, for messages."""
    found = [other for other in (Path("runs") / path, Path("exports") / path) if other.is_dir()]
    beside = [other.name for other in path.parent.iterdir() if other.is_dir()] if path.parent.is_dir() else []
    found += [path.parent / name for name in difflib.get_close_matches(path.name, beside, n=1)]
    if found:
        return f"; did you mean {found[0]}?"
    listed = ", ".join(sorted(beside)[:6]) if path.parent != Path() else ""
    return f"; {path.parent} holds {listed}." if listed else "."


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run; nothing is created by asking for a path."""

    root: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root))

    @classmethod
    def of(cls, config: RunConfig) -> "RunFolder":
        """Return the folder in which the run of a config trains."""
        return cls(Path(config.folder) / config.name)

    def refuse_obstacles(self) -> None:
        """Raise RunFolderError if a folder stands where a run writes a file, or a file where it needs a folder."""
        markers = (self.lock, self.done, self.requeue, self.failed)
        for path in (self.config, self.data_plan, self.tokenizer, self.latest, *markers):
            if path.is_dir():
                raise RunFolderError(f"{path}: is a folder, where a run writes a file. Move it away, then start again.")
        for path in (self.root, self.checkpoints, self.exports, self.logs, self.verified):
            if path.exists() and not path.is_dir():
                raise RunFolderError(f"{path}: is not a folder, but a run needs one. Move it away, then start again.")
        root = self.root.absolute()
        around = next((parent for parent in root.parents if RunFolder(parent).latest.is_file()), None)
        if around:
            raise RunFolderError(
                f"{root}: lies in the folder of another run, {around}. To resume that run, start in the directory that"
                " it was started in. For a new run, name another folder=DIR."
            )

    config = Inside("config.yaml")
    """The file of the complete config, exactly as run."""

    data_plan = Inside("data_plan.json")
    """Seed, fingerprints and phases of the data."""

    mixture = Inside("mixture.yaml")
    """The mixture that a branch composed of its trunk's and its own."""

    branches = Inside("branches")
    """The folder with a file for each run that branches from this one, which names its step."""

    tokenizer = Inside("tokenizer.json")
    """The file of the data's tokenizer."""

    verified = Inside("verified")
    """The folder that records which token shards were verified, one small file each."""

    checkpoints = Inside("checkpoints")

    latest = Inside("checkpoints/latest")
    """The file that names the newest complete checkpoint."""

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}"

    exports = Inside("exports")
    """The folder of the Hugging Face exports that the run itself writes."""

    def export(self, step: int) -> Path:
        return self.exports / f"step_{step:08d}"

    metrics = Inside("metrics.jsonl")
    """The metrics file, with one JSON object per step."""

    events = Inside("events.jsonl")
    """The events file, with one JSON object per event."""

    log = Inside("log.txt")
    """The log file, with steps and events as text."""

    tensorboard = Inside("tensorboard")

    profile = Inside("profile")
    """The folder for profiler traces."""

    evaluations = Inside("evaluations")
    """The folder of scores, with one JSON file per checkpoint."""

    def evaluation(self, step: int, ema: bool = False) -> Path:
        """Return the file of a checkpoint's scores, or of those of its averaged weights."""
        return (self.evaluations / "ema" if ema else self.evaluations) / f"step_{step:08d}.json"

    report = Inside("report.html")

    requeue = Inside("requeue")
    """The marker for "saved on request, start me again"; launchers change exit codes."""

    done = Inside("done")
    """The marker for a complete run: all tokens consumed and the last step saved."""

    failed = Inside("failed")
    """The marker of a job that ended and cannot continue by itself; the next start removes it."""

    def waiting(self) -> Iterator[Path]:
        """Yield the marker of each file of records whose last lines could not be written yet."""
        return self.root.glob(f"*{WAITING}")

    lock = Inside("lock")
    """The lock file, held by the job that trains in this folder."""

    launches = Inside("launch")
    """The folder of launches, one numbered folder each with code, config and job as submitted."""

    logs = Inside("logs")
    """The folder for output, heartbeats and hang reports of each rank of each job."""
