"""The share of the time in which a run advances, from failures, the checkpoint interval and the restart time.

A failure costs half a checkpoint interval on average, whose steps are computed again, and the restart. Saves run in the
background and count as free.
"""

from dataclasses import dataclass

MONTH = 30 * 86400.0
FAILURES = 0.1
"""Assumed, per node and month. Llama 3's report has 419 unexpected interruptions in 54 days on 16,384 GPUs: 0.11."""
RESTART_MINUTES: float = 10
"""Assumed: until the first step after a failure."""


@dataclass(frozen=True)
class Goodput:
    """The time that a run loses to failures."""

    failures: float
    """Per node and month."""
    seconds_between_failures: float
    """Of any of the run's nodes."""
    lost_per_failure: float
    """Seconds."""

    @property
    def share(self) -> float:
        """The share of the time in which the run advances."""
        return self.seconds_between_failures / (self.seconds_between_failures + self.lost_per_failure)


def goodput(
    interval: float, nodes: int, failures: float = FAILURES, restart_minutes: float = RESTART_MINUTES
) -> Goodput:
    """Return the time lost to failures; `failures` is above 0, `interval` the seconds between checkpoints."""
    lost = interval / 2 + 60 * restart_minutes
    return Goodput(failures, MONTH / (failures * nodes), lost)
