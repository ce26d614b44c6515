"""The learning rate, on megatron-core's scheduler: a function of the samples consumed and of nothing else.

Having no state of its own, it resumes exactly, and a changed learning rate acts from the next step on. A changed global
batch leaves the curve over the samples as it was.
"""

from types import SimpleNamespace

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.config.groups import chosen
from megatron_blackmamba.engine.parts import replace
from megatron_blackmamba.training.step.optimizer import DECAY_FACTOR, RATE_FACTOR

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


class Schedule:
    """Warm-up from 0, then the decay to the minimum, which the run's last step reaches."""

    def __init__(self, config: RunConfig, optimizer: MegatronOptimizer) -> None:
        self.batch = config.training.global_batch
        self._optimizer, self._has_groups = optimizer, bool(chosen(config.optimizer))
        decay = config.optimizer.weight_decay
        self.scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=config.optimizer.learning_rate,
            min_lr=config.optimizer.min_learning_rate,
            lr_warmup_steps=config.warmup_samples,
            lr_decay_steps=config.samples,
            lr_decay_style=config.optimizer.decay,
            start_wd=decay,
            end_wd=decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    def set(self, consumed_samples: int) -> float:
        """Prepare the step after `consumed_samples`; returns its learning rate, without factors of optimizer.groups.

        The step is given the rate at its end, so that the first one is not lost to a rate of 0.
        """
        replace(self.scheduler, "num_steps", consumed_samples + self.batch)
        self.scheduler.step(0)
        if self._has_groups:
            for group in self._optimizer.param_groups:
                group["lr"] *= group.get(RATE_FACTOR, 1.0)
                group["weight_decay"] *= group.get(DECAY_FACTOR, 1.0)
        return self.scheduler.get_lr({})


def rate_change(before: RunConfig, now: RunConfig, step: int, consumed_samples: int) -> list[str]:
    """Return a line with both learning rates of the next step if a changed config gives it another one."""
    old, new = (Schedule(config, SimpleNamespace(param_groups=[])) for config in (before, now))
    old.batch = new.batch  # the same place on both curves
    was, becomes = old.set(consumed_samples), new.set(consumed_samples)
    if was == becomes:
        return []
    return [f"learning rate: {becomes:.3g} at step {step + 1}, where the schedule before the change has {was:.3g}"]
