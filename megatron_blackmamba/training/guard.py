"""What happens when a step goes wrong: its loss or gradient is not finite, or its loss leaps far above the last ones.

Every rank judges the same numbers with the same history, so all come to the same verdict without talking.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Any

from megatron_blackmamba.config.run import GuardConfig

FEWEST_LOSSES = 8  # a median of less says nothing
SMALLEST_DEVIATION = 1e-3  # of the median, so that a flat curve does not turn noise into spikes


class Action(Enum):
    APPLY = "apply"
    """Update the weights."""
    SKIP = "skip"
    """Leave the weights as they are and go on with the next batch."""
    REWIND = "rewind"
    """Go back to the last checkpoint and past this batch."""
    STOP = "stop"
    """Too many bad steps in a row: end the run."""


@dataclass(frozen=True)
class Verdict:
    """What to do with a step, and why when it is not simply a good one."""

    action: Action
    reason: str | None = None


class Guard:
    """Looks at a step's loss before the update, and settles what it was once the gradient norm is known too."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.losses: deque[float] = deque(maxlen=config.spike_window)
        self.bad_in_a_row = 0
        self.skipped = 0

    def look(self, loss: float) -> Verdict:
        """Whether the weights may be updated by the gradients of this loss; remembers nothing yet."""
        if not math.isfinite(loss):
            return Verdict(Action.SKIP, f"the loss is {loss}")
        if self.config.spike == "off" or len(self.losses) < FEWEST_LOSSES:
            return Verdict(Action.APPLY)
        usual = median(self.losses)
        deviation = median(abs(x - usual) for x in self.losses)
        if loss <= usual + self.config.spike_deviations * max(deviation, SMALLEST_DEVIATION * abs(usual)):
            return Verdict(Action.APPLY)
        action = {"warn": Action.APPLY, "skip": Action.SKIP, "rewind": Action.REWIND}[self.config.spike]
        return Verdict(action, f"a spike: the loss is {loss:.4f}, the median of {len(self.losses)} steps {usual:.4f}")

    def settle(self, seen: Verdict, loss: float, grad_norm: float) -> Verdict:
        """The last word on a step, and the next ones are judged by it. `grad_norm` counts if an update was tried."""
        if seen.action is Action.APPLY and not math.isfinite(grad_norm):
            seen = Verdict(Action.SKIP, f"the gradient norm is {grad_norm}")
        if seen.action is Action.APPLY:
            self.bad_in_a_row = 0
            self.losses.append(loss)
            return seen
        self.bad_in_a_row += 1
        self.skipped += 1
        if self.bad_in_a_row >= self.config.max_bad_steps:
            return Verdict(
                Action.STOP, f"{seen.reason}; bad steps in a row: {self.bad_in_a_row} (training.guard.max_bad_steps)"
            )
        return seen

    def state(self) -> dict[str, Any]:
        """For the checkpoint: with it, a resumed run judges as one that never stopped."""
        return {"losses": list(self.losses), "bad_in_a_row": self.bad_in_a_row, "skipped": self.skipped}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=self.config.spike_window)
        self.bad_in_a_row = state["bad_in_a_row"]
        self.skipped = state["skipped"]
