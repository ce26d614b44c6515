"""Decide what to do with a step whose loss or gradient is not finite, or whose loss jumps far above recent losses.

Every rank judges the same numbers with the same history, so all reach the same verdict without communication.

A loss that rises and stays high, for example because the data changed, is a new level and not a spike. At most
`max_spikes` consecutive steps are lost to spikes, whatever `spike` says, and spikes never end a run. A step that is not
finite says nothing about the level: it neither counts as a spike nor ends a row of spikes.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from statistics import median
from typing import Any

from megatron_blackmamba.settings import GuardConfig

FEWEST_LOSSES = 8  # a median of less says nothing
SMALLEST_DEVIATION = 1e-3  # of the median, so that a flat curve does not turn noise into spikes


class Action(Enum):
    APPLY = "apply"
    """Update the weights."""
    SKIP = "skip"
    """Leave the weights as they are and go on with the next batch."""
    REWIND = "rewind"
    """Go back to the last checkpoint; if the batch is to blame, train past it."""
    STOP = "stop"
    """End the run."""


class Cause(Enum):
    SPIKE = "spike"
    NOT_FINITE = "not finite"
    REPLICAS = "replicas differ"


@dataclass(frozen=True)
class Verdict:
    """The action for a step, and the reason if the step is bad."""

    action: Action
    reason: str | None = None
    cause: Cause | None = None
    rewind_to: int | None = None
    """The step of the checkpoint to go back to."""


class Guard:
    """The guard: it judges a step by its loss before the update, and again by its gradient norm."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.losses: deque[float] = deque(maxlen=config.spike_window)
        self.bad_in_a_row = 0
        self.spikes_in_a_row = 0

    def look(self, loss: float) -> Verdict:
        """Return the verdict on a loss, before the update; the loss is not remembered yet."""
        if not math.isfinite(loss):
            return Verdict(Action.SKIP, f"the loss is {loss}", Cause.NOT_FINITE)
        if self.config.spike == "off" or len(self.losses) < FEWEST_LOSSES:
            return Verdict(Action.APPLY)
        usual = median(self.losses)
        deviation = median(abs(x - usual) for x in self.losses)
        if loss <= usual + self.config.spike_deviations * max(deviation, SMALLEST_DEVIATION * abs(usual)):
            return Verdict(Action.APPLY)
        action = {"warn": Action.APPLY, "skip": Action.SKIP, "rewind": Action.REWIND}[self.config.spike]
        usual_was = f"the median of {len(self.losses)} steps {usual:.4f}"
        return Verdict(action, f"a spike: the loss is {loss:.4f}, {usual_was}", Cause.SPIKE)

    def settle(self, seen: Verdict, loss: float, grad_norm: float) -> Verdict:
        """Return the final verdict, and remember the step. `grad_norm` counts only if an update was tried."""
        if seen.action is Action.APPLY and not math.isfinite(grad_norm):
            seen = Verdict(Action.SKIP, f"the gradient norm is {grad_norm}", Cause.NOT_FINITE)
        if seen.cause is Cause.NOT_FINITE:
            return self._not_finite(seen)
        self.bad_in_a_row = 0
        if seen.action is Action.APPLY:
            self.losses.append(loss)
        self.spikes_in_a_row = self.spikes_in_a_row + 1 if seen.cause is Cause.SPIKE else 0
        if self.spikes_in_a_row < self.config.max_spikes:
            return seen
        self.forget()
        level = f"{self.config.max_spikes} in a row are a new level (training.guard.max_spikes): the next steps count"
        return replace(seen, reason=f"{seen.reason}; {level}")

    def _not_finite(self, seen: Verdict) -> Verdict:
        self.bad_in_a_row += 1
        if self.bad_in_a_row < self.config.max_bad_steps:
            return replace(seen, action=Action.REWIND) if self.config.spike == "rewind" else seen
        counted = f"bad steps in a row: {self.bad_in_a_row} (training.guard.max_bad_steps)"
        return replace(seen, action=Action.STOP, reason=f"{seen.reason}; {counted}")

    def replicas_differ(self, where: str) -> Verdict:
        """Judge a step whose weights were not the same on ranks that must hold the same."""
        action = Action.REWIND if self.config.spike == "rewind" else Action.STOP
        return Verdict(action, f"replicas of weights differ: {where}", Cause.REPLICAS)

    def forget(self) -> None:
        """Forget the usual loss and learn it anew."""
        self.losses.clear()
        self.spikes_in_a_row = 0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, so that a resumed run judges as one that never stopped."""
        return {
            "losses": list(self.losses),
            "bad_in_a_row": self.bad_in_a_row,
            "spikes_in_a_row": self.spikes_in_a_row,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=self.config.spike_window)
        self.bad_in_a_row = state["bad_in_a_row"]
        self.spikes_in_a_row = state.get("spikes_in_a_row", 0)  # older checkpoints have none
