"""The folder of a run: the paths of all its files, for code that writes them and code that reads them."""

from dataclasses import dataclass
from pathlib import Path


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
        for path in (self.config, self.data_plan, self.tokenizer, self.latest, self.lock, self.done, self.requeue):
            if path.is_dir():
                raise RunFolderError(f"{path}: is a folder, where a run writes a file. Move it away, then start again.")
        for path in (self.root, self.checkpoints, self.logs, self.verified):
            if path.exists() and not path.is_dir():
                raise RunFolderError(f"{path}: is not a folder, but a run needs one. Move it away, then start again.")

    @property
    def config(self) -> Path:
        """The composed config, exactly as run."""
        return self.root / "config.yaml"

    @property
    def data_plan(self) -> Path:
        """Seed, fingerprints and phases of the data."""
        return self.root / "data_plan.json"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer the data was made with."""
        return self.root / "tokenizer.json"

    @property
    def verified(self) -> Path:
        """Which token shards were read and found correct, one small file each."""
        return self.root / "verified"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def latest(self) -> Path:
        """Names the newest complete checkpoint."""
        return self.checkpoints / "latest"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """One JSON object an event."""
        return self.root / "events.jsonl"

    @property
    def log(self) -> Path:
        """Steps and events as lines for people."""
        return self.root / "log.txt"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def profile(self) -> Path:
        """Traces, when asked for."""
        return self.root / "profile"

    @property
    def evaluations(self) -> Path:
        """Scores, one JSON file a checkpoint."""
        return self.root / "evaluations"

    def evaluation(self, step: int) -> Path:
        return self.evaluations / f"step_{step:08d}.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def requeue(self) -> Path:
        """There when training stopped on request after saving: start it again. Launchers change exit codes."""
        return self.root / "requeue"

    @property
    def done(self) -> Path:
        """Exists once the run has consumed its tokens and its last step is saved."""
        return self.root / "done"

    @property
    def lock(self) -> Path:
        """Held by the job that trains here."""
        return self.root / "lock"

    @property
    def launches(self) -> Path:
        """One numbered folder a launch: the code, the config and the job as they were submitted."""
        return self.root / "launch"

    @property
    def logs(self) -> Path:
        """Output, heartbeats and reports of hangs of each rank of each job."""
        return self.root / "logs"
