"""The folder of a run: the paths of all its files, for code that writes them and code that reads them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WAITING = ".waiting"
"""End of the name of an empty file: lines of the file beside it wait in memory, as on a full disk."""


class RunFolderError(ValueError):
    """A run folder in which no run can write."""


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run; nothing is created by asking for a path."""

    root: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root))

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

    @property
    def config(self) -> Path:
        """Return the file of the complete config, exactly as run."""
        return self.root / "config.yaml"

    @property
    def data_plan(self) -> Path:
        """Seed, fingerprints and phases of the data."""
        return self.root / "data_plan.json"

    @property
    def mixture(self) -> Path:
        """Return the mixture that a branch composed of its trunk's and its own."""
        return self.root / "mixture.yaml"

    @property
    def branches(self) -> Path:
        """Return the folder with a file for each run that branches from this one, which names its step."""
        return self.root / "branches"

    @property
    def tokenizer(self) -> Path:
        """Return the file of the data's tokenizer."""
        return self.root / "tokenizer.json"

    @property
    def verified(self) -> Path:
        """Return the folder that records which token shards were verified, one small file each."""
        return self.root / "verified"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def latest(self) -> Path:
        """Return the file that names the newest complete checkpoint."""
        return self.checkpoints / "latest"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}"

    @property
    def exports(self) -> Path:
        """Return the folder of the Hugging Face exports that the run itself writes."""
        return self.root / "exports"

    def export(self, step: int) -> Path:
        return self.exports / f"step_{step:08d}"

    @property
    def metrics(self) -> Path:
        """Return the metrics file, with one JSON object per step."""
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """Return the events file, with one JSON object per event."""
        return self.root / "events.jsonl"

    @property
    def log(self) -> Path:
        """Return the log file, with steps and events as text."""
        return self.root / "log.txt"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def profile(self) -> Path:
        """Return the folder for profiler traces."""
        return self.root / "profile"

    @property
    def evaluations(self) -> Path:
        """Return the folder of scores, with one JSON file per checkpoint."""
        return self.root / "evaluations"

    def evaluation(self, step: int) -> Path:
        return self.evaluations / f"step_{step:08d}.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def requeue(self) -> Path:
        """Return the marker for "saved on request, start me again"; launchers change exit codes."""
        return self.root / "requeue"

    @property
    def done(self) -> Path:
        """Return the marker for a complete run: all tokens consumed and the last step saved."""
        return self.root / "done"

    @property
    def failed(self) -> Path:
        """Return the marker of a job that ended and cannot continue by itself; the next start removes it."""
        return self.root / "failed"

    def waiting(self) -> Iterator[Path]:
        """Yield the marker of each file of records whose last lines could not be written yet."""
        return self.root.glob(f"*{WAITING}")

    @property
    def lock(self) -> Path:
        """Return the lock file, held by the job that trains in this folder."""
        return self.root / "lock"

    @property
    def launches(self) -> Path:
        """Return the folder of launches, one numbered folder each with code, config and job as submitted."""
        return self.root / "launch"

    @property
    def logs(self) -> Path:
        """Return the folder for output, heartbeats and hang reports of each rank of each job."""
        return self.root / "logs"
