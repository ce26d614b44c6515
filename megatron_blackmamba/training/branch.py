"""A run that begins as another one was at a checkpoint: weights, optimizer, progress and place in the data.

`start.branch=RUN@STEP` leaves the trunk RUN after STEP. Steps, tokens and samples go on counting, so the schedule of
the learning rate does too. The branch says how it goes on: schedule, length, batch and data. It needs the trunk only
until its own first checkpoint.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_blackmamba.checkpoint import manifest
from megatron_blackmamba.checkpoint.agreement import found_by_main
from megatron_blackmamba.checkpoint.reading import find_checkpoint, read_state, saved_config
from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.data import DataPlan, refuse_changed_data
from megatron_blackmamba.data.branch import after, continued
from megatron_blackmamba.formats import branches
from megatron_blackmamba.formats.events import Branched
from megatron_blackmamba.formats.mixture import Mixture, MixtureError
from megatron_blackmamba.formats.reads import refusal, reread
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.plan.stages import Beginning
from megatron_blackmamba.runtime.world import World
from megatron_blackmamba.training.start.resume import ResumeError, differences, refuse_tokenizer, rule_of, shown
from megatron_blackmamba.training.step.learning_rates import rate_change
from megatron_blackmamba.training.step.progress import Progress


@dataclass(frozen=True)
class Branch:
    """The place where a run leaves its trunk, and what it takes over from there."""

    checkpoint: Path
    step: int
    trunk: RunConfig
    state: dict[str, Any]
    """What the checkpoint holds beside tensors."""
    relength: bool
    """The branch has another sequence length, and therefore an order of samples of its own."""
    progress: Progress
    changes: tuple[str, ...] = ()
    """What the branch changes of what decides the weights, and the learning rate if that jumps."""

    def mixture(self, config: RunConfig) -> Mixture | None:
        """Return the trunk's mixture up to the branch and the branch's after it; None if data.mixture says it all."""
        ours, theirs = config.data.mixture, self.trunk.data.mixture
        if ours is None or theirs is None:
            return None
        if self.relength:
            return after(self.state["data"], Progress.restored(self.state["progress"]).next_sample, Mixture.read(ours))
        if ours == theirs:
            return None
        try:
            before = Mixture.read(theirs)
        except MixtureError as error:
            raise ResumeError(
                f"start.branch={config.start.branch}: needs the trunk's mixture as well as its own: {error}"
            ) from None
        then = Mixture.read(ours)
        if _order(before) == _order(then):
            return before.independent() if before.read_before else None
        return continued(before, then, self.progress.next_sample, config.data.sequence_length)

    def refuse_data(self, record: dict[str, Any]) -> None:
        """Refuse data (as DataPlan.record) of another tokenizer, or other data than the trunk's before the branch."""
        refuse_tokenizer(self.state["data"], record, self.step)
        if not self.relength:
            refuse_changed_data(self.state["data"], record, self.progress.next_sample)

    def refuse_reread(self, config: RunConfig, data: DataPlan) -> None:
        """Refuse sequences of another length that read text again, unless the config accepts that."""
        again = self._again(data)
        if again and not config.start.reread:
            raise ResumeError(f"start.branch={config.start.branch}: {refusal(config.data.sequence_length, again)}")

    def _again(self, data: DataPlan) -> str:
        """Return how much a branch with another sequence length reads again."""
        return reread(data.read_again()) if self.relength else ""

    def reads_on(self, record: dict[str, Any]) -> bool:
        """Return whether the branch goes on with the trunk's data."""
        kept = ("sequence_length", "phases", "sources")
        return all(record[key] == self.state["data"][key] for key in kept)

    def event(self, config: RunConfig, data: DataPlan, **more: Any) -> Branched:
        """Describe the beginning of the branch."""
        progress, own = self.progress, RunFolder.of(config).mixture
        return Branched(
            trunk=str(self.checkpoint),
            sample=progress.next_sample,
            consumed_samples=progress.consumed_samples,
            steps_left=config.steps_left(progress.consumed_samples),
            tokens_per_step=config.batch_at(progress.consumed_samples) * config.data.sequence_length,
            relength=self.relength,
            changes=[*self.changes, *filter(None, [self._again(data)])],
            mixture=str(own) if config.data.mixture == str(own.resolve()) else None,
            **more,
        )


def pinned(config: RunConfig, world: World) -> RunConfig:
    """Return the config with the checkpoint that rank 0 finds for start.branch: RUN may go on and save another one."""
    if config.start.branch is None or not _begins(config):
        return config
    spec = config.start.branch
    found = found_by_main(world, lambda: branches.place_of(*checkpoint_at(spec)))
    return config.model_copy(update={"start": config.start.model_copy(update={"branch": found})})


def find_branch(config: RunConfig) -> Branch | None:
    """Return where a new run leaves its trunk; None if it does not branch, or has a checkpoint of its own.

    Raises ResumeError if the trunk is gone, or if the branch changes what it may not. Nothing is written.
    """
    if config.start.branch is None or not _begins(config):
        return None
    checkpoint, step = checkpoint_at(config.start.branch)
    state = read_state(checkpoint, ("config", "progress", "guard", "data"))
    trunk = saved_config(checkpoint, state)
    progress = Progress.restored(state["progress"])
    changes = _changes(config, trunk, checkpoint)
    relength = config.data.sequence_length != trunk.data.sequence_length
    if relength:
        progress = progress.at_length(
            trunk.data.sequence_length,
            config.data.sequence_length,
            progress.next_sample if config.data.kind == "synthetic" else 0,  # endless: no sample is of the same text
        )
    if progress.consumed_samples >= config.samples:
        done = progress.consumed_samples * config.data.sequence_length
        raise ResumeError(
            f"start.branch={config.start.branch}: the trunk has consumed {done} tokens there, and"
            f" training.tokens={config.training.tokens} of this run counts them. Set training.tokens above {done}."
        )
    changes += rate_change(trunk, config, step, progress.consumed_samples)
    return Branch(checkpoint, step, trunk, state, relength, progress, tuple(changes))


def _order(mixture: Mixture) -> dict[str, Any]:
    """Return what decides the order of a mixture's sources."""
    return mixture.independent().model_dump(exclude={"read_before"})


def _begins(config: RunConfig) -> bool:
    """Return whether the run has no checkpoint of its own yet."""
    return not RunFolder.of(config).latest.is_file()


def checkpoint_at(spec: str) -> tuple[Path, int]:
    """Return the checkpoint that a start.branch names, and its step."""
    path, step = branches.split(spec)
    run = RunFolder(Path(path))
    folder = run.root if step is None else run.checkpoint(step)
    if step is not None and run.checkpoints.is_dir() and not folder.is_dir():
        kept = [known for each in run.checkpoints.iterdir() if (known := manifest.step_in_name(each)) is not None]
        said = f"has those of steps {', '.join(map(str, sorted(kept)))}" if kept else "has none"
        raise ResumeError(f"start.branch={spec}: {path} has no checkpoint of step {step}; it {said}.")
    found = find_checkpoint(folder).resolve()
    return found, Progress.restored(read_state(found, ("progress",))["progress"]).step


def with_own_data(config: RunConfig, branch: Branch | None) -> tuple[RunConfig, Mixture | None]:
    """Return the config with the mixture in its folder that a branch reads, and its content if it is not written yet.

    A branch that resumes reads what it composed at its start, whatever data.mixture has become.
    """
    own = RunFolder.of(config).mixture
    mixture = branch.mixture(config) if branch else None
    if mixture is None and (branch or config.start.branch is None or not own.is_file()):
        return config, None
    return config.model_copy(update={"data": config.data.model_copy(update={"mixture": str(own.resolve())})}), mixture


def may_differ(key: str) -> bool:
    """Return whether a branch may have another value of a key than its trunk."""
    return rule_of(key).branch != "fixed"


def _changes(config: RunConfig, trunk: RunConfig, checkpoint: Path) -> list[str]:
    """Return a line for each change of what decides the weights; refuse what a branch may not change."""
    old, new = (each.model_dump(mode="json", by_alias=True) for each in (trunk, config))
    found = list(differences(old, new))
    fixed = [change for change in found if not may_differ(change[0])]
    if fixed:
        said = "; ".join(f"{key}={old} there, and {new} here" for key, old, new in fixed)
        raise ResumeError(
            f"start.branch={config.start.branch}: {checkpoint} was made with {said}. A branch goes on with the trunk's"
            " model and optimizer. Restore these values, or use start.from, which takes the weights alone."
        )
    return [
        f"{key}: {shown(new)}, in the trunk {shown(old)}" for key, old, new in found if rule_of(key).branch == "told"
    ]


def beginning(config: RunConfig) -> Beginning:
    """Return where a run begins, for its plan; refuse a branch that training would refuse."""
    branch = find_branch(config)
    if branch is None:
        return Beginning()
    progress = branch.progress
    readable = config.data.mixture is None or Path(config.data.mixture).is_file()
    return Beginning(
        progress.step,
        progress.consumed_samples,
        progress.next_sample,
        progress.end_of_data(config),
        branch.mixture(config) if readable else None,
        branch.checkpoint,
        branch.relength,
    )
