"""The learning rates and weight decays of the optimizer's groups before each step.

They are a function of the samples consumed and of nothing else (`settings/run_schedule.py`). So a run resumes exactly,
and a changed learning rate acts from the next step on. A changed global batch leaves the curve over the samples as it
was, and so does a ramp.
"""

from typing import TYPE_CHECKING

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.training.step.optimizer import DECAY_FACTOR, RATE_FACTOR

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer


class Schedule:
    def __init__(self, config: RunConfig, optimizer: "MegatronOptimizer") -> None:
        self.config = config
        self._optimizer = optimizer

    def set(self, consumed_samples: int) -> float:
        """Prepare the step after `consumed_samples`; returns its learning rate, without factors of optimizer.groups.

        The step is given the rate at its end, so that the first one is not lost to a rate of 0.
        """
        rate = self.config.learning_rate_at(consumed_samples + self.config.batch_at(consumed_samples))
        decay = self.config.optimizer.weight_decay
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group.get(RATE_FACTOR, 1.0)
            group["weight_decay"] = decay * group.get("wd_mult", 1.0) * group.get(DECAY_FACTOR, 1.0)
        return rate


def rate_change(before: RunConfig, now: RunConfig, step: int, consumed_samples: int) -> list[str]:
    """Return a line with both learning rates of the next step if a changed config gives it another one."""
    end = consumed_samples + now.batch_at(consumed_samples)
    same = end * now.data.sequence_length // before.data.sequence_length  # the same place on both curves
    was, becomes = f"{before.learning_rate_at(same):.3g}", f"{now.learning_rate_at(end):.3g}"
    if was == becomes:
        return []
    return [f"learning rate: {becomes} at step {step + 1}, where the schedule before the change has {was}"]
