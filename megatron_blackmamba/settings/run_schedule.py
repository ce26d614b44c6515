"""The course of a run: its batches, its steps, and the learning rate, a function of the samples consumed alone."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_blackmamba.settings.optimizer import SHAPES, OptimizerConfig


class Scheduled:
    """What follows from the lengths and batches in a run's config."""

    if TYPE_CHECKING:
        training: Any
        data: Any
        optimizer: OptimizerConfig

    def learning_rate_at(self, samples: int) -> float:
        """Return the learning rate of a step that ends at `samples`, without the factors of optimizer.groups.

        It rises from 0 over the warm-up, and decays to the minimum, which the run's last step reaches.
        """
        optimizer, warmup = self.optimizer, self.warmup_samples
        highest, lowest = optimizer.learning_rate, optimizer.min_learning_rate
        if warmup > 0 and samples <= warmup:
            return highest * samples / warmup
        if optimizer.decay == "constant":
            return highest
        if samples > self.samples:
            return lowest
        late = optimizer.decay == "wsd"
        shape, decay = (optimizer.decay_shape, self.decay_samples) if late else (optimizer.decay, self.samples - warmup)
        left = SHAPES[shape](max(0, samples - (self.samples - decay)) / decay)
        return lowest + left * (highest - lowest)

    def _fits_schedule(self) -> None:
        """Refuse a decay that does not fit behind the warm-up."""
        optimizer = self.optimizer
        warmup, decay = self.warmup_samples, self.decay_samples
        if optimizer.warmup_tokens is not None and warmup >= self.samples:
            raise ValueError(
                f"optimizer.warmup_tokens={optimizer.warmup_tokens} is not less than the run's"
                f" training.tokens={self.training.tokens}"
            )
        if optimizer.decay == "wsd" and warmup + decay > self.samples:
            length = self.data.sequence_length
            raise ValueError(
                f"the decay of {decay * length} tokens does not fit behind the warm-up of {warmup * length} in"
                f" training.tokens={self.training.tokens}. Shorten it with optimizer.decay_tokens or"
                " optimizer.decay_fraction."
            )

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of a step with training.global_batch."""
        return self.training.global_batch * self.data.sequence_length

    @property
    def samples(self) -> int:
        """Return the number of sequences of the whole run: `tokens`, rounded up to whole sequences."""
        return -(-self.training.tokens // self.data.sequence_length)

    @property
    def warmup_samples(self) -> int:
        if self.optimizer.warmup_tokens is not None:
            return self.optimizer.warmup_tokens // self.data.sequence_length
        return int(self.optimizer.warmup_fraction * self.samples)

    @property
    def decay_samples(self) -> int:
        """Return the samples of the decay at the end, if optimizer.decay is wsd; at least one."""
        tokens = self.optimizer.decay_tokens
        if tokens is not None:
            return -(-tokens // self.data.sequence_length)
        return max(1, round(self.optimizer.decay_fraction * (self.samples - self.warmup_samples)))

    @property
    def batches(self) -> list[int]:
        """Return the global batches of the run, in order."""
        return [*(stage.batch for stage in self.training.batch_ramp), self.training.global_batch]

    def batch_at(self, consumed_samples: int) -> int:
        """Return the global batch of the step after `consumed_samples`."""
        tokens = consumed_samples * self.data.sequence_length
        return next((s.batch for s in self.training.batch_ramp if tokens < s.until), self.training.global_batch)

    @property
    def steps(self) -> int:
        """Return the number of steps of the whole run, if it uses these batches from the start."""
        return self.steps_left(0)

    @property
    def warmup_steps(self) -> int:
        return sum(steps for _, steps in self._stages(0, self.warmup_samples, round))

    @property
    def decay_steps(self) -> int:
        """Return the number of steps of the decay of wsd."""
        return sum(steps for _, steps in self._stages(self.samples - self.decay_samples, self.samples, round))

    def steps_left(self, consumed_samples: int) -> int:
        """Return the steps until all samples are consumed; the last batch is complete and may exceed `tokens`."""
        return sum(steps for _, steps in self.stages_left(consumed_samples))

    def samples_left(self, consumed_samples: int) -> int:
        """Return the samples of the steps that are left."""
        return sum(batch * steps for batch, steps in self.stages_left(consumed_samples))

    def stages_left(self, consumed_samples: int) -> list[tuple[int, int]]:
        """Return the global batches of the steps that are left, in order, each with its number of steps."""
        return self._stages(consumed_samples, self.samples)

    def _stages(self, first: int, end: int, whole: Callable[[float], int] = math.ceil) -> list[tuple[int, int]]:
        """Return the global batches and steps from sample `first` to `end`."""
        found, at = [], first
        for stage in self.training.batch_ramp:
            until = min(end, -(-stage.until // self.data.sequence_length))
            found.append((stage.batch, -(-max(0, until - at) // stage.batch)))
            at += stage.batch * found[-1][1]
        found.append((self.training.global_batch, whole(max(0, end - at) / self.training.global_batch)))
        return [(batch, steps) for batch, steps in found if steps]

    def last_step(self, step: int, consumed_samples: int) -> int:
        """Return the last step of a job that is at `step`: the end of the run, or training.stop_after_steps."""
        end = step + self.steps_left(consumed_samples)
        return min(end, self.training.stop_after_steps or end)
