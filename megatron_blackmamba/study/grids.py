"""Losses of the values of a grid, and the learning rate that `best_rate` takes."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_blackmamba.study.config import RATE
from megatron_blackmamba.study.points import Point, chosen, unique

LARGEST = 3
"""Budgets that choose a learning rate."""


@dataclass(frozen=True)
class Tried:
    """The values of a key that were tried at a variant, size and budget."""

    flops: float
    losses: dict[float, float]
    """Value → mean loss of the seeds that have them all, by rising value."""

    @property
    def lowest(self) -> float:
        """Return the value with the lowest loss."""
        return min(self.losses, key=lambda value: self.losses[value])

    @property
    def at_edge(self) -> bool:
        """Return whether that is the smallest or largest one; so it is with two values."""
        return self.lowest in (min(self.losses), max(self.losses))


def tried_values(points: Sequence[Point], key: str) -> dict[tuple[str, str, int], Tried]:
    """Return the values of a key by variant, size and budget, where two or more numbers were tried."""
    some = [(_diverged_is_worst(p), value) for p in points if (value := value_of(p, key)) is not None]
    found = {}
    for place in dict.fromkeys((p.variant, p.size, p.budget) for p, _ in some):
        at = [(p, value) for p, value in some if (p.variant, p.size, p.budget) == place]
        values = sorted({value for _, value in at})
        seeds = set.intersection(*({p.seed for p, its in at if its == value} for value in values))
        if len(values) > 1 and seeds:
            means = [statistics.fmean(p.loss for p, its in at if its == v and p.seed in seeds) for v in values]
            found[place] = Tried(at[0][0].flops, dict(zip(values, means, strict=True)))
    return found


def _diverged_is_worst(point: Point) -> Point:
    """Return the point with an infinite loss if it diverged: without it, the mean would be that of lucky seeds."""
    return point if math.isfinite(point.loss) else replace(point, loss=math.inf)


def value_of(point: Point, key: str) -> float | None:
    """Return a point's value of a key; None unless it is a number above 0 and nothing else was changed."""
    value = point.changed.get(key, point.rate if key == RATE else None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return float(value) if is_number and point.changed.keys() <= {key} else None  # type: ignore[arg-type]


def choosing(points: Sequence[Point], size: str) -> set[int]:
    """Return the seeds with which a variant of this size has tried two or more learning rates."""
    rates: dict[tuple[str, int], set[float]] = {}
    for p in (p for p in chosen(points, size=size) if value_of(p, RATE)):
        rates.setdefault((p.variant, p.seed), set()).add(p.rate)
    return {seed for (_, seed), tried in rates.items() if len(tried) > 1}


def best_rates(points: Sequence[Point]) -> dict[tuple[str, str], Tried]:
    """Return the learning rates of each variant and size, by the mean loss over its largest budgets."""
    means = []
    for variant, size in dict.fromkeys((p.variant, p.size) for p in points):
        own = [_diverged_is_worst(p) for p in chosen(points, variant=variant, size=size) if value_of(p, RATE)]
        budgets = sorted(b for b in unique(own, "budget") if len(unique(chosen(own, budget=b), "rate")) > 1)[-LARGEST:]
        runs: dict[tuple[int, float], list[Point]] = {}
        for p in (p for p in own if p.budget in budgets):
            runs.setdefault((p.seed, p.rate), []).append(p)
        whole = [run for run in runs.values() if len(run) == len(budgets)]
        means += [replace(run[-1], loss=statistics.fmean(p.loss for p in run)) for run in whole]
    return {(variant, size): tried for (variant, size, _), tried in tried_values(means, RATE).items()}
