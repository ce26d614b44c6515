"""Whether a run without a GPU fits into the memory of this machine, asked before its first step."""

import os
import re
from collections.abc import Iterator

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.plan import memory
from megatron_blackmamba.plan.memory import GIB
from megatron_blackmamba.runtime import machine

BYTES_A_PARAMETER = 40
"""More than the weight, the gradient and the optimizer state of a parameter ever take."""


class TooLarge(ValueError):
    """A run whose weights, gradients and optimizer state alone exceed the memory of this machine."""


def processes_here() -> int:
    """Return the number of processes of the run on this machine, as its launcher says."""
    told = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    found = re.match(r"\d+", told)  # Slurm writes 2(x3) for three nodes
    return int(found[0]) if found else 1


def notes(config: RunConfig, processes: int, here: int, parameters: int) -> Iterator[str]:
    """Yield what to say about a run that may not fit; refuse one that cannot.

    here: Processes on this machine.
    parameters: Of the whole model.
    """
    has, _ = machine.memory()
    step = here * memory.beside_state(config, processes, "cpu")
    if here * BYTES_A_PARAMETER * parameters + step < has:  # without building the model
        return
    stages = config.parallel.pipeline
    states = [memory.state_of(config, processes, stage * processes // stages) for stage in range(stages)]
    state = sum(one.weights + one.gradients + one.optimizer for one in states) * here // stages
    who = "this process" if here == 1 else f"the {here} processes here"
    if state > has:
        raise TooLarge(
            f"{config.name} does not fit: weights, gradients and optimizer state of {who} need {state / GIB:,.1f} GiB,"
            f" and this machine has {has / GIB:,.1f} GiB. Use a smaller model, or more machines"
            " (`blackmamba plan CONFIG --nodes N --suggest`)"
        )
    if state + step > has:
        yield (
            f"{who} may need {(state + step) / GIB:,.0f} GiB, and this machine has {has / GIB:,.0f} GiB: use a smaller"
            f" training.micro_batch (now {config.training.micro_batch}), or training.recompute=layers"
        )
