"""Find where a run will begin, for its plan. Importing this loads no PyTorch: only a branch needs it."""

from pathlib import Path

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.plan.stages import Beginning


def beginning(config: RunConfig) -> Beginning:
    """Return where a run begins: a branch at a checkpoint of its trunk, which is refused if it does not fit."""
    if config.start.branch is None:
        return Beginning()
    from megatron_blackmamba.training.start.branch import find_branch

    branch = find_branch(config)
    if branch is None:  # it has checkpoints of its own
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
    )
