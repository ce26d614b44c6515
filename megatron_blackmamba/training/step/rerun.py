"""Repeat a non-finite step on the same samples, to find out whether a device failed, or the data or model.

The same samples and weights give the same bits. A value that is finite on the second run was not finite because of a
device; its gradients are good, and training continues with them. Otherwise the step is bad, and the message says where
it was first seen.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron_blackmamba.training.step.step import Losses, Update
from megatron_blackmamba.training.watch.finite import FirstSeen, described
from megatron_blackmamba.training.watch.guard import Action, Verdict
from megatron_blackmamba.training.watch.ranks import Ranks


@dataclass(frozen=True)
class Attempt:
    """One run of a step: its losses, what the guard saw in them, and the update."""

    losses: Losses
    seen: Verdict
    update: Update

    @property
    def problem(self) -> str | None:
        """Return what is not finite, or None if the step is good or was skipped for another reason."""
        if not math.isfinite(self.losses.loss):
            return f"the loss is {self.losses.loss}"
        if self.seen.action is Action.APPLY and not math.isfinite(self.update.grad_norm):
            return f"the gradient norm is {self.update.grad_norm}"
        return None


def run_again(first: Attempt, again: Callable[[], Attempt], seen: FirstSeen, ranks: Ranks) -> tuple[Attempt, str]:
    """Repeat a step that is not finite. Return the attempt to continue with, and what the two say together."""
    where = seen.gather()
    second = again()
    if second.problem is None:
        suspects = f"suspect {described(where, ranks)}"
        return second, f"{first.problem}, but finite when the same samples ran again: a device failed; {suspects}"
    return second, f"the same when run again, so the data or the model; {described(seen.gather(), ranks)}"
