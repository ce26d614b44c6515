"""Conclusions from differences: declared comparisons, tests that allow for their number, and FLOPs at equal loss."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from megatron_blackmamba.report.confidence import half_interval, side_of
from megatron_blackmamba.study.config import PrimaryConfig
from megatron_blackmamba.study.points import Point, chosen, declared_losses, unique
from studies.fits import Difference, differences

TESTED_FROM = 10.0
"""Tokens per parameter from which on budgets count for a test."""


@dataclass(frozen=True)
class Comparison:
    """Two variants at one size, tested on each seed's mean difference over the larger budgets."""

    first: str
    other: str
    size: str
    by_seed: dict[int, float]
    adjusted: float = math.nan
    """The p-value, by Holm's method for all tests of the study."""

    @property
    def p(self) -> float:
        """Return the two-sided p-value of Student's t."""
        return p_value([*self.by_seed.values()])


def comparisons(points: Sequence[Point], pairs: Sequence[tuple[str, str, str]]) -> list[Comparison]:
    """Return those of two variants and a size that three seeds have."""
    found = []
    for first, other, size in pairs:
        by_seed = {seed: _mean_of_large(points, first, other, size, seed) for seed in unique(points, "seed")}
        known = {seed: mean for seed, mean in by_seed.items() if mean is not None}
        if len(known) > 2:
            found.append(Comparison(first, other, size, known))
    adjusted = holm([one.p for one in found])
    return [replace(one, adjusted=p) for one, p in zip(found, adjusted, strict=True)]


def _mean_of_large(points: Sequence[Point], one: str, other: str, size: str, seed: int) -> float | None:
    own = differences([p for p in points if p.seed == seed], one, other, size)
    large = [each.mean for each in own if each.per_parameter >= TESTED_FROM]
    return statistics.fmean(large) if large else None


def p_value(values: Sequence[float]) -> float:
    """Return the two-sided p-value of a mean of zero by Student's t."""
    if len(set(values)) == 1:
        return 0.0 if values[0] else 1.0
    return float(stats.ttest_1samp(values, 0.0).pvalue)


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number: the smallest times all, the next times one less, never falling."""
    order, largest, adjusted = sorted(range(len(values)), key=lambda i: values[i]), 0.0, [0.0] * len(values)
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, values[i] * (len(values) - rank)))
        adjusted[i] = largest
    return adjusted


@dataclass(frozen=True)
class Decision:
    """A comparison declared beforehand, over the seeds that are finished.

    The model is loss = mean of the variant + part of the seed + rest. The variants of a seed share its part. So the
    difference has the variance of both rests, which may differ, and Student's t over the seeds is exact.
    """

    declared: PrimaryConfig
    losses: dict[int, tuple[float, float]]

    @property
    def differences(self) -> list[float]:
        """Return the difference of each seed."""
        return [one - other for one, other in self.losses.values()]

    @property
    def verdict(self) -> str:
        """Return which variant is better, once all declared seeds are finished."""
        if len(self.losses) < len(self.declared.seeds):
            return "no conclusion before all seeds are finished"
        if not all(map(math.isfinite, self.differences)):
            return "open, the loss of a run is not finite"
        side = side_of(self.differences)
        if not side:
            return "open, the interval contains 0"
        return f"{self.declared.sides[side > 0]} {'is lower' if self.declared.gain_on else 'has the lower loss'}"

    @property
    def variances(self) -> tuple[float, float, float]:
        """Return the variance of the seeds' part, and of the rest of each variant; negative ones are estimates of 0."""
        seeds = np.cov(np.array([*self.losses.values()]).T)
        return float(seeds[0, 1]), float(seeds[0, 0] - seeds[0, 1]), float(seeds[1, 1] - seeds[0, 1])


def decide(points: Sequence[Point], declared: PrimaryConfig) -> Decision:
    """Return a declared comparison of points: each of its seeds has one learning rate."""
    return Decision(declared, declared_losses(points, declared))


@dataclass(frozen=True)
class Equal:
    """The FLOPs that another variant needs for the loss of the first, over the first's, by seed."""

    other: str
    difference: Difference
    by_seed: dict[int, float]
    bounds: frozenset[int]
    """Seeds whose ratio is larger: the other's curve ends above the loss."""

    @property
    def described(self) -> str:
        """Return the geometric mean over the seeds, with its 95% interval unless a seed has a bound alone."""
        logs = [math.log(ratio) for ratio in self.by_seed.values()]
        mean, half = statistics.fmean(logs), None if self.bounds else half_interval(logs)
        within = "" if half is None else f" ({math.exp(mean - half):.2f} to {math.exp(mean + half):.2f})"
        return f"{'> ' if self.bounds else ''}{math.exp(mean):.2f}{within}"


def equal_losses(points: Sequence[Point], first: str, other: str, size: str) -> list[Equal]:
    """Return it at each budget where the other's curve reaches the loss in a seed; nothing is extrapolated.

    A seed is left out where the other's curve is not falling, or begins below the loss.
    """
    found = []
    for each in differences(points, first, other, size):
        by_seed, bounds = {}, set()
        for point in chosen(points, variant=first, size=size, budget=each.budget):
            theirs = chosen(points, variant=other, size=size, seed=point.seed)
            losses = [p.loss for p in theirs][::-1]
            if losses and losses == sorted(losses) and point.loss <= losses[-1]:
                spent = float(np.interp(point.loss, losses, np.log([p.flops for p in theirs][::-1])))
                by_seed[point.seed] = math.exp(spent) / point.flops
                bounds |= {point.seed} if point.loss < losses[0] else set()
        if by_seed.keys() > bounds:
            found.append(Equal(other, each, by_seed, frozenset(bounds)))
    return found


def flops_for_equal_loss(points: Sequence[Point], declared: PrimaryConfig) -> str | None:
    """Return what part of the FLOPs `one` needs for the loss of `other` at the budget, over the declared seeds."""
    own = [p for p in points if p.seed in declared.seeds]
    found = equal_losses(own, declared.other, declared.one, declared.size)
    return next((e.described for e in found if e.difference.budget == declared.budget and len(e.by_seed) > 1), None)
