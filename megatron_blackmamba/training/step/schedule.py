"""The learning rate, on megatron-core's scheduler: a function of the samples consumed and of nothing else.

Having no state of its own, it resumes exactly, and a changed learning rate acts from the next step on. A changed global
batch leaves the curve over the samples as it was, and so does a ramp.
"""

from types import SimpleNamespace

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.engine.parts import replace
from megatron_blackmamba.training.step.optimizer import DECAY_FACTOR, RATE_FACTOR

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

STYLES = {"wsd": "WSD", "sqrt": "minus_sqrt"}
"""megatron-core's names of shapes, where they differ from the config's."""


class Schedule:
    """Warm-up from 0, then the decay to the minimum, which the run's last step reaches."""

    def __init__(self, config: RunConfig, optimizer: MegatronOptimizer) -> None:
        self.config = config
        self._optimizer = optimizer
        self._has_groups = any(RATE_FACTOR in group for group in optimizer.param_groups)
        decay = config.optimizer.weight_decay
        self.scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=config.optimizer.learning_rate,
            min_lr=config.optimizer.min_learning_rate,
            lr_warmup_steps=config.warmup_samples,
            lr_decay_steps=config.samples,
            lr_decay_style=STYLES.get(config.optimizer.decay, config.optimizer.decay),
            wsd_decay_steps=config.decay_samples,
            lr_wsd_decay_style=STYLES.get(config.optimizer.decay_shape, config.optimizer.decay_shape),
            start_wd=decay,
            end_wd=decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    def set(self, consumed_samples: int) -> float:
        """Prepare the step after `consumed_samples`; returns its learning rate, without factors of optimizer.groups.

        The step is given the rate at its end, so that the first one is not lost to a rate of 0.
        """
        return self.at_end_of_step(consumed_samples + self.config.batch_at(consumed_samples))

    def at_end_of_step(self, samples: int) -> float:
        """Set the rate of a step that ends at `samples`, and return it."""
        replace(self.scheduler, "num_steps", samples)
        self.scheduler.step(0)
        if self._has_groups:
            for group in self._optimizer.param_groups:
                group["lr"] *= group.get(RATE_FACTOR, 1.0)
                group["weight_decay"] *= group.get(DECAY_FACTOR, 1.0)
        return self.scheduler.get_lr({})


def rate_at(config: RunConfig, consumed_samples: int) -> float:
    """Return the learning rate of the step that ends at `consumed_samples`."""
    return Schedule(config, SimpleNamespace(param_groups=[])).at_end_of_step(consumed_samples)


def rate_change(before: RunConfig, now: RunConfig, step: int, consumed_samples: int) -> list[str]:
    """Return a line with both learning rates of the next step if a changed config gives it another one."""
    end = consumed_samples + now.batch_at(consumed_samples)
    same = end * now.data.sequence_length // before.data.sequence_length  # the same place on both curves
    was, becomes = f"{rate_at(before, same):.3g}", f"{rate_at(now, end):.3g}"
    if was == becomes:
        return []
    return [f"learning rate: {becomes} at step {step + 1}, where the schedule before the change has {was}"]
