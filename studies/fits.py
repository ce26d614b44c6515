"""Conclusions from a study's points: differences, where their sign turns, and the best learning rate."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_blackmamba.study.config import RATE
from megatron_blackmamba.study.points import Point, chosen, unique
from megatron_blackmamba.study.results import half_interval

LARGEST = 3
"""Budgets that choose a learning rate."""


@dataclass(frozen=True)
class Difference:
    """Loss of one variant less that of another, at one size and budget, for each seed that both have."""

    size: str
    budget: int
    per_parameter: float
    """Tokens per parameter of the first variant."""
    flops: float
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Return the mean over the seeds."""
        return statistics.fmean(self.values)

    @property
    def interval(self) -> float | None:
        """Return half of the 95% interval of the mean; None from one seed."""
        return half_interval(self.values)


def differences(points: Sequence[Point], one: str, other: str, size: str) -> list[Difference]:
    """Return the differences at every budget at which a seed has both variants."""
    theirs = {(p.seed, p.budget): p.loss for p in chosen(points, variant=other, size=size)}
    ours = [p for p in chosen(points, variant=one, size=size) if (p.seed, p.budget) in theirs]
    found = []
    for budget in sorted(unique(ours, "budget")):
        at = chosen(ours, budget=budget)
        values = tuple(p.loss - theirs[p.seed, p.budget] for p in at)
        found.append(Difference(size, budget, at[0].tokens / at[0].parameters, at[0].flops, values))
    return found


NEXT_SIZE = ", next size"
AS_MANY = 0.1
"""Largest relative difference of parameters in all that counts as none."""


def with_next_size(points: Sequence[Point]) -> list[Point]:
    """Return the points, and dense models that have as many parameters as those with experts, at equal FLOPs.

    These are of the next size. Their loss is interpolated over the logarithm of FLOPs, and never extrapolated.
    """
    found, experts = [*points], [p for p in points if p.parameters > p.active]
    for variant, size, larger in itertools.product(*(unique(points, "variant"), *[unique(points, "size")] * 2)):
        ours, dense = chosen(experts, size=size), chosen(points, variant=variant, size=larger)
        if size == larger or not (ours and dense) or dense[0].parameters > dense[0].active:
            continue
        most = ours[0].parameters
        if abs(dense[0].parameters / most - 1) > AS_MANY:
            continue
        for at in {(p.seed, p.budget): p for p in ours if p.parameters == most}.values():
            curve = {p.flops: p.loss for p in chosen(dense, seed=at.seed)}
            if curve and min(curve) <= at.flops <= max(curve):
                loss = _interpolated(curve, at.flops)
                tokens = round(at.flops * dense[0].tokens / dense[0].flops)
                size_of: dict[str, Any] = {
                    "parameters": dense[0].parameters,
                    "active": dense[0].active,
                    "tokens": tokens,
                }
                found.append(replace(at, variant=variant + NEXT_SIZE, loss=loss, router={}, **size_of))
    return found


def _interpolated(curve: Mapping[float, float], flops: float) -> float:
    """Return the loss on the polynomial through the four nearest points: a straight line lies above a curve."""
    near = sorted(curve, key=lambda each: abs(math.log(each / flops)))[:4]
    x = [math.log(each / flops) for each in near]
    return float(np.polyfit(x, [curve[each] for each in near], len(near) - 1)[-1])


@dataclass(frozen=True)
class Crossing:
    """Tokens per parameter at which the sign of a difference turns for good, at one size."""

    by_seed: dict[int, float]
    """Seed → tokens per parameter, of the seeds that turn as most do."""
    better_after: bool
    """Whether the first variant has the lower loss from there on; else up to there."""
    never: int
    """Other seeds in which it has the higher loss at the largest budget."""
    always: int
    """Other seeds in which it has the lower loss at the largest budget."""

    @property
    def mean(self) -> float:
        """Return the geometric mean over the seeds that turn."""
        return math.exp(statistics.fmean(map(math.log, self.by_seed.values())))

    @property
    def band(self) -> tuple[float, float] | None:
        """Return the 95% interval of that mean; None unless two seeds turn, and all seeds do."""
        half = half_interval([math.log(value) for value in self.by_seed.values()])
        if half is None or self.never or self.always:
            return None
        return self.mean / math.exp(half), self.mean * math.exp(half)


def crossing(points: Sequence[Point], one: str, other: str, size: str) -> Crossing | None:
    """Return where the last change of sign is, interpolated linearly over the logarithm of tokens."""
    ends: dict[int, bool] = {}
    turns: dict[int, float] = {}
    for seed in unique(points, "seed"):
        own = differences([p for p in points if p.seed == seed], one, other, size)
        if not own:
            continue
        ends[seed] = own[-1].mean <= 0
        if before := [i for i, each in enumerate(own) if (each.mean <= 0) != ends[seed]]:
            a, b = own[before[-1]], own[before[-1] + 1]
            part = a.mean / (a.mean - b.mean)
            turns[seed] = math.exp((1 - part) * math.log(a.per_parameter) + part * math.log(b.per_parameter))
    if not ends:
        return None
    better = 2 * sum(ends[seed] for seed in turns or ends) >= len(turns or ends)
    found = {seed: turn for seed, turn in turns.items() if ends[seed] == better}
    rest = [end for seed, end in ends.items() if seed not in found]
    return Crossing(found, better, rest.count(False), rest.count(True))


@dataclass(frozen=True)
class Best:
    """The value of a key with the lowest loss, on a parabola through the logarithms of the values tried."""

    key: str
    variant: str
    size: str
    budget: int
    flops: float
    tried: dict[float, float]
    """Value → mean loss of the seeds that have them all."""
    value: float
    loss: float
    at_edge: bool
    """The lowest loss tried is at the smallest or largest value, which is then taken; so it is with two values."""

    @property
    def lowest(self) -> float:
        """Return the value tried with the lowest loss."""
        return min(self.tried, key=lambda value: self.tried[value])

    @property
    def twice(self) -> float | None:
        """Return what a factor of 2 from the best value costs; None at an edge."""
        if self.at_edge:
            return None
        return float(np.polyfit(np.log2([*self.tried]), [*self.tried.values()], 2)[0])


def best_values(points: Sequence[Point], key: str) -> list[Best]:
    """Return the best value of a key for each variant, size and budget at which two or more numbers were tried."""
    some = [(p, value) for p in points if math.isfinite(p.loss) and (value := _value(p, key)) is not None]
    found = []
    for variant, size, budget in dict.fromkeys((p.variant, p.size, p.budget) for p, _ in some):
        at = [(p, value) for p, value in some if (p.variant, p.size, p.budget) == (variant, size, budget)]
        values = sorted({value for _, value in at})
        seeds = set.intersection(*({p.seed for p, its in at if its == value} for value in values))
        tried = {
            value: statistics.fmean(p.loss for p, its in at if its == value and p.seed in seeds)
            for value in values
            if seeds
        }
        if len(tried) < 2:
            continue
        lowest = min(tried, key=lambda value: tried[value])
        at_edge = lowest in (min(tried), max(tried))
        value, loss = (lowest, tried[lowest]) if at_edge else _vertex(tried, lowest)
        found.append(Best(key, variant, size, budget, at[0][0].flops, tried, value, loss, at_edge))
    return found


def _value(point: Point, key: str) -> float | None:
    """Return a point's value of a key; None unless it is a number above 0 and nothing else was changed."""
    value = point.changed.get(key, point.rate if key == RATE else None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return float(value) if is_number and point.changed.keys() <= {key} else None  # type: ignore[arg-type]


def best_rates(points: Sequence[Point]) -> dict[tuple[str, str], Best]:
    """Return the best learning rate of each variant and size, by the mean loss over its largest budgets."""
    means = []
    for variant, size in dict.fromkeys((p.variant, p.size) for p in points):
        own = [p for p in chosen(points, variant=variant, size=size) if _value(p, RATE) and math.isfinite(p.loss)]
        budgets = sorted(b for b in unique(own, "budget") if len(unique(chosen(own, budget=b), "rate")) > 1)[-LARGEST:]
        runs: dict[tuple[int, float], list[Point]] = {}
        for p in (p for p in own if p.budget in budgets):
            runs.setdefault((p.seed, p.rate), []).append(p)
        whole = [run for run in runs.values() if len(run) == len(budgets)]
        means += [replace(run[-1], loss=statistics.fmean(p.loss for p in run)) for run in whole]
    return {(best.variant, best.size): best for best in best_values(means, RATE)}


def at_best_rates(points: Sequence[Point]) -> list[Point]:
    """Return the points at the best learning rate of their variant and size.

    The seeds that have all rates choose it. All seeds that have it count.
    """
    best = {key: own.lowest for key, own in best_rates(points).items()}
    return [replace(p, changed={}) for p in points if _value(p, RATE) and best.get((p.variant, p.size)) == p.rate]


def over_flops(best: Sequence[Best]) -> float | None:
    """Return the power of FLOPs that the best value follows, from at least three budgets within the grid."""
    inside = [each for each in best if not each.at_edge]
    if len(inside) < 3:
        return None
    x, y = np.log([each.flops for each in inside]), np.log([each.value for each in inside])
    return float(np.polyfit(x, y, 1)[0])


def _vertex(tried: dict[float, float], lowest: float) -> tuple[float, float]:
    """Return the minimum of the parabola through the lowest value and its neighbours."""
    values = [*tried]
    i = values.index(lowest)
    near = values[i - 1 : i + 2]
    curve = np.poly1d(np.polyfit(np.log2(near), [tried[value] for value in near], 2))
    at = -curve.c[1] / (2 * curve.c[0])
    return float(2**at), float(curve(at))
