"""The steps of a run: where they begin, and the stages of a ramp, each with its global batch."""

from dataclasses import dataclass, replace
from pathlib import Path

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats.mixture import Mixture


@dataclass(frozen=True)
class Beginning:
    """The place where a run begins: the start, or the checkpoint that a branch leaves its trunk at."""

    step: int = 0
    consumed_samples: int = 0
    next_sample: int = 0
    """Position in the data."""
    end_of_data: int | None = None
    """Index behind the last sample, if the run passes over samples; None: `next_sample` plus those that are left."""
    mixture: Mixture | None = None
    """What a branch composes of its trunk's mixture and its own; None: data.mixture as it is."""
    trunk: Path | None = None
    """The checkpoint."""
    relength: bool = False
    """A branch has another sequence length than its trunk."""


@dataclass(frozen=True)
class Stage:
    """Consecutive steps with one global batch."""

    global_batch: int
    first: int
    """The first step."""
    steps: int
    tokens: int
    seconds_per_step: float | None = None
    """On given nodes."""


def stages_of(config: RunConfig, begins: Beginning) -> tuple[Stage, ...]:
    """Return the stages of a run from its beginning on."""
    found, first = [], begins.step + 1
    for batch, steps in config.stages_left(begins.consumed_samples):
        found.append(Stage(batch, first, steps, steps * batch * config.data.sequence_length))
        first += steps
    return tuple(found)


def with_batch(config: RunConfig, stage: Stage) -> RunConfig:
    """Return the config of a run that has the global batch of a stage all the time."""
    training = config.training.model_copy(update={"global_batch": stage.global_batch, "batch_ramp": []})
    return config.model_copy(update={"training": training})


def timed(stage: Stage, seconds: float) -> Stage:
    return replace(stage, seconds_per_step=seconds)
