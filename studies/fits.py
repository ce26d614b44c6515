"""Conclusions from a study's points: differences, where their sign turns, and the best learning rate."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_blackmamba.report.confidence import half_interval
from megatron_blackmamba.study.config import RATE
from megatron_blackmamba.study.grids import Tried, best_rates, tried_values, value_of
from megatron_blackmamba.study.points import Point, chosen, unique


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
            loss = loss_at({p.flops: p.loss for p in chosen(dense, seed=at.seed)}, at.flops)
            if loss is not None:
                tokens = round(at.flops * dense[0].tokens / dense[0].flops)
                size_of: dict[str, Any] = {
                    "parameters": dense[0].parameters,
                    "active": dense[0].active,
                    "tokens": tokens,
                }
                found.append(replace(at, variant=variant + NEXT_SIZE, loss=loss, router={}, **size_of))
    return found


def loss_at(curve: Mapping[float, float], flops: float, beyond: float = 0.0) -> float | None:
    """Return the loss on the polynomial through the four nearest points: a straight line lies above a curve.

    Return None where nothing was measured, except within this fraction beyond the ends.
    """
    if not curve or not min(curve) / (1 + beyond) <= flops <= max(curve) * (1 + beyond):
        return None
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
    measured: tuple[float, float] = (0.0, math.inf)
    """Fewest and most tokens per parameter of the points."""

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

    @property
    def interval(self) -> str:
        """Return that interval in words, which extrapolate nothing."""
        if self.band is None:
            return ""
        (low, high), (fewest, most) = self.band, self.measured
        below, above = f"{low:.1f}" if low >= fewest else f"below {fewest:.1f}", f"{high:.1f}"
        return f"{below} to {above if high <= most else f'beyond {most:.1f}'}"


def crossing(points: Sequence[Point], one: str, other: str, size: str) -> Crossing | None:
    """Return where the last change of sign is, interpolated linearly over the logarithm of tokens."""
    ends: dict[int, bool] = {}
    places: list[float] = []
    turns: dict[int, float] = {}
    for seed in unique(points, "seed"):
        own = differences([p for p in points if p.seed == seed], one, other, size)
        if not own:
            continue
        places += [each.per_parameter for each in own]
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
    return Crossing(found, better, rest.count(False), rest.count(True), (min(places), max(places)))


@dataclass(frozen=True)
class Best:
    """The value of a key with the lowest loss, on a parabola through the logarithms of the values tried."""

    variant: str
    size: str
    tried: Tried
    value: float
    """Where the lowest loss tried is at an edge, that one."""
    loss: float

    @property
    def flops(self) -> float:
        """Return the training FLOPs of the runs."""
        return self.tried.flops

    @property
    def twice(self) -> float | None:
        """Return what a factor of 2 from the best value costs; None at an edge, or if a run diverged."""
        if self.tried.at_edge or not all(map(math.isfinite, self.tried.losses.values())):
            return None
        return float(np.polyfit(np.log2([*self.tried.losses]), [*self.tried.losses.values()], 2)[0])


def best_values(points: Sequence[Point], key: str) -> list[Best]:
    """Return the best value of a key for each variant, size and budget at which two or more numbers were tried."""
    tried = tried_values(points, key)
    return [Best(variant, size, each, *_vertex(each)) for (variant, size, _), each in tried.items()]


def at_best_rates(points: Sequence[Point]) -> list[Point]:
    """Return the points at the best learning rate of their variant and size.

    The seeds that have all rates choose it. All seeds that have it count.
    """
    best = {key: own.lowest for key, own in best_rates(points).items()}
    finite = [p for p in points if value_of(p, RATE) and math.isfinite(p.loss)]
    return [replace(p, changed={}) for p in finite if best.get((p.variant, p.size)) == p.rate]


def over_flops(best: Sequence[Best]) -> float | None:
    """Return the power of FLOPs that the best value follows, from at least three budgets within the grid."""
    inside = [each for each in best if not each.tried.at_edge]
    if len(inside) < 3:
        return None
    x, y = np.log([each.flops for each in inside]), np.log([each.value for each in inside])
    return float(np.polyfit(x, y, 1)[0])


def _vertex(tried: Tried) -> tuple[float, float]:
    """Return the minimum of the parabola through the lowest value and its neighbours; at an edge, the lowest."""
    values = [*tried.losses]
    i = values.index(tried.lowest)
    near = values[max(0, i - 1) : i + 2]
    if tried.at_edge or not all(math.isfinite(tried.losses[value]) for value in near):
        return tried.lowest, tried.losses[tried.lowest]
    curve = np.poly1d(np.polyfit(np.log2(near), [tried.losses[value] for value in near], 2))
    at = -curve.c[1] / (2 * curve.c[0])
    return float(2**at), float(curve(at))
