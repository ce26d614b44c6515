"""The picture of a study on trunks and branches: models with experts against dense ones, at equal FLOPs."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_blackmamba.report.charts import Chart, Line, Lines
from megatron_blackmamba.report.confidence import half_interval
from megatron_blackmamba.study.points import Evidence, Point, chosen, unique
from studies import fits

SEEDS_OF_A_BAND = 3
"""With two seeds Student's factor is 12.7, and the band would hide the lines."""
EQUAL = 0.06
"""Largest relative difference of FLOPs per token that counts as equal."""


def charts(evidence: Evidence, pictured: Mapping[str, str]) -> list[Chart]:
    """Return losses at equal FLOPs, and differences from dense models; nothing without such a difference.

    Variants may want other learning rates: the best one tried for each counts, if enough seeds have it.
    """
    names = dict(pictured) or {each: each.replace("_", " ") for each in _shown(evidence)}
    tuned, plain = (fits.with_next_size(some) for some in (fits.at_best_rates(evidence.points), evidence.plain))
    enough = all(len(unique(chosen(tuned, variant=each), "seed")) >= SEEDS_OF_A_BAND for each in names)
    points = tuned if enough else plain
    names |= {each + fits.NEXT_SIZE: f"{name} of the next size" for each, name in names.items()}
    names = {each: names[each] for each in names if any(p.variant == each for p in points)}
    experts = [each for each in names if (some := chosen(points, variant=each)) and some[0].active < some[0].parameters]
    dense = [each for each in names if each not in experts]
    sizes = _by_parameters([p for p in points if experts and p.variant == experts[0]])
    changes = []
    for j, variant in enumerate(experts):
        for i, other in enumerate(dense, len(experts)):
            for k, size in enumerate(sizes):
                found = fits.differences(points, variant, other, size)
                name = f"{names[variant]}, less {names[other]}" + (f", size {size}" if len(sizes) > 1 else "")
                changes.append(curve_of(name, found, math.inf if j else SEEDS_OF_A_BAND, colour=i, dashed=j + k > 0))
    if not any(len(curve.x) for curve in changes):
        return []
    label = "training tokens per parameter of the model with experts"
    worse = zero(changes, "experts are worse above, better below")
    return [
        Lines("Validation loss at equal training FLOPs, in nats", _losses(points, names, experts, dense, sizes),
              x_label=label, log=True),
        Lines("What experts change: loss with, less loss without", [*changes, *worse], x_label=label, log=True),
    ]  # fmt: skip


def mean_curve(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    """Return FLOPs, and the mean loss of the points there."""
    spent = sorted(unique(points, "flops"))
    return spent, [statistics.fmean(p.loss for p in chosen(points, flops=each)) for each in spent]


def curve_of(name: str, found: Sequence[fits.Difference], band_from: float = 2, **looks: Any) -> Line:
    """Return differences over tokens per parameter, with 95% intervals from `band_from` seeds on."""
    return banded(name, [each.per_parameter for each in found], [each.values for each in found], band_from, **looks)


def banded(
    name: str, x: Sequence[float], values: Sequence[Sequence[float]], band_from: float = 2, **looks: Any
) -> Line:
    """Return the means of values over x, with 95% intervals from `band_from` values on."""
    mean = np.array([statistics.fmean(each) for each in values])
    half = np.array([(half_interval(each) or 0.0) if len(each) >= band_from else 0.0 for each in values])
    return Line(name, x, mean, mean - half, mean + half, **looks)


def zero(curves: Sequence[Line], name: str = "equal") -> list[Line]:
    """Return a line at zero below curves."""
    ends = [x for curve in curves for x in curve.x]
    return [Line(name, [min(ends), max(ends)], [0.0, 0.0], colour=len(curves), dashed=True, thin=True)] if ends else []


def _shown(evidence: Evidence) -> list[str]:
    """Return the first variant, and the dense ones of equal FLOPs per token."""
    points, shown = evidence.plain, [evidence.first]
    for other in unique(points, "variant"):
        theirs = chosen(points, variant=other)[0]
        ours = chosen(points, variant=evidence.first, size=theirs.size)[:1]
        if ours and theirs.parameters == theirs.active and abs(_per_token(theirs) / _per_token(ours[0]) - 1) < EQUAL:
            shown.append(other)
    return shown


def _per_token(point: Point) -> float:
    return point.flops / point.tokens


def _losses(
    points: Sequence[Point],
    names: Mapping[str, str],
    experts: Sequence[str],
    dense: Sequence[str],
    sizes: Sequence[str],
) -> list[Line]:
    curves = []
    tokens = {p.flops: p.tokens / p.parameters for p in chosen(points, variant=experts[0])}
    for number, variant in enumerate([*experts, *dense]):
        for size in sizes if variant in dense else sizes[: 1 if len(experts) > 1 else None]:
            if some := chosen(points, variant=variant, size=size):
                spent, losses = mean_curve(some)
                x = [_near(tokens, each) for each in spent]
                name = f"{names[variant]}: {_parameters(some[0])}"
                curves.append(Line(name, x, losses, colour=number, dashed=size != sizes[0]))
    return curves


def _near(known: Mapping[float, float], flops: float) -> float:
    """Return the value at the nearest FLOPs: variants train for equal ones up to a batch."""
    return known[min(known, key=lambda each: abs(each - flops))]


def _parameters(point: Point) -> str:
    active = f", {point.active / 1e6:.2g}M active" if point.active < point.parameters else ""
    return f"{point.parameters / 1e6:.2g}M parameters{active}"


def _by_parameters(points: Sequence[Point]) -> list[str]:
    """Return the sizes of a variant, the smallest model first."""
    sizes = {p.size: p.parameters for p in points}
    return sorted(sizes, key=lambda size: sizes[size])
