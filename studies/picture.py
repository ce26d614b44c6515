"""The picture of a study with trunks and branches: models with experts against dense ones, at equal FLOPs."""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_blackmamba.report.pictures import picture
from megatron_blackmamba.study.points import Evidence, Point, chosen, unique
from studies import fits

LINES = ("solid", "dashed", "dotted", "dashdot")
SEEDS_OF_A_BAND = 3
"""With two seeds Student's factor is 12.7, and the band would hide the lines."""
TICKS = [mantissa * 10.0**power for power in range(-2, 5) for mantissa in (1, 2, 5)]
EQUAL = 0.06
"""Largest relative difference of FLOPs per token that counts as equal."""


def write_picture(evidence: Evidence, pictured: Mapping[str, str], folder: Path) -> Path | None:
    """Write NAME.png: losses at equal FLOPs on the left, differences from dense models on the right.

    Variants may want other learning rates: the best one tried for each counts, if enough seeds have it.
    """
    names = dict(pictured) or {each: _plain(each) for each in _shown(evidence)}
    tuned, plain = (fits.with_next_size(some) for some in (fits.at_best_rates(evidence.points), evidence.plain))
    enough = all(len(unique(chosen(tuned, variant=each), "seed")) >= SEEDS_OF_A_BAND for each in names)
    points = tuned if enough else plain
    names |= {each + fits.NEXT_SIZE: f"{name} of the next size" for each, name in names.items()}
    names = {each: names[each] for each in names if any(p.variant == each for p in points)}
    experts = [each for each in names if (some := chosen(points, variant=each)) and some[0].active < some[0].parameters]
    dense = [each for each in names if each not in experts]
    sizes = _by_parameters([p for p in points if experts and p.variant == experts[0]])
    if not any(fits.differences(points, experts[0], other, size) for other in dense for size in sizes):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    draw = partial(_draw, points, names, experts, dense, sizes)
    return picture(folder / f"{evidence.name}.png", draw, columns=2)


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


def _draw(
    points: Sequence[Point],
    names: Mapping[str, str],
    experts: Sequence[str],
    dense: Sequence[str],
    sizes: Sequence[str],
    axes: Any,
) -> bool:
    left, right = axes
    tokens = {p.flops: p.tokens / p.parameters for p in chosen(points, variant=experts[0])}
    for number, variant in enumerate([*experts, *dense]):
        for size in sizes if variant in dense else sizes[: 1 if len(experts) > 1 else None]:
            some = chosen(points, variant=variant, size=size)
            if not some:
                continue
            spent = sorted({p.flops for p in some})
            losses = [statistics.fmean(p.loss for p in chosen(some, flops=each)) for each in spent]
            label = f"{names[variant]}: {_parameters(some[0])}"
            style = {"color": f"C{number}", "linestyle": LINES[sizes.index(size) % len(LINES)]}
            left.plot([_near(tokens, each) for each in spent], losses, marker=".", linewidth=1.2, label=label, **style)
    for j, variant in enumerate(experts):
        for i, other in enumerate(dense, len(experts)):
            for k, size in enumerate(sizes):
                line = LINES[(j + k) % len(LINES)]
                _difference(right, fits.differences(points, variant, other, size), f"C{i}", line, band=j == 0)
        if len(experts) > 1:
            right.plot([], [], color="black", linestyle=LINES[j], label=names[variant])
    for i, other in enumerate(dense, len(experts)):
        right.plot([], [], color=f"C{i}", label=f"against {names[other]}")
    right.axhline(0, color="black", linewidth=0.8)
    for place in axes:
        place.set(xscale="log", xlabel="training tokens per parameter of the model with experts")
        low, high = place.get_xlim()
        place.set_xticks([tick for tick in TICKS if low <= tick <= high])
        place.xaxis.set_major_formatter("{x:g}")
        place.xaxis.set_minor_formatter("")
        place.legend(frameon=False, fontsize="small")
    left.set_title("Validation loss at equal training FLOPs, in nats", fontsize="medium")
    right.set_title("What experts change: loss with, less loss without", fontsize="medium")
    for shift, word in ((7, "worse ↑"), (-9, "better ↓")):
        where = {"xycoords": right.get_yaxis_transform(), "textcoords": "offset points", "fontsize": "small"}
        right.annotate(f"experts are {word}", (0.01, 0), (0, shift), va="center", **where)
    return True


def _near(known: Mapping[float, float], flops: float) -> float:
    """Return the value at the nearest FLOPs: variants train for equal ones up to a batch."""
    return known[min(known, key=lambda each: abs(each - flops))]


def _parameters(point: Point) -> str:
    active = f", {point.active / 1e6:.2g}M active" if point.active < point.parameters else ""
    return f"{point.parameters / 1e6:.2g}M parameters{active}"


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _by_parameters(points: Sequence[Point]) -> list[str]:
    """Return the sizes of a variant, the smallest model first."""
    sizes = {p.size: p.parameters for p in points}
    return sorted(sizes, key=lambda size: sizes[size])


def _difference(place: Any, found: Sequence[fits.Difference], colour: str, style: str, band: bool) -> None:
    x, mean = [each.per_parameter for each in found], np.array([each.mean for each in found])
    half = np.array([each.interval if len(each.values) >= SEEDS_OF_A_BAND else np.nan for each in found])
    place.plot(x, mean, color=colour, linestyle=style, marker=".", linewidth=1.2)
    if band and found:
        place.fill_between(x, mean - half, mean + half, color=colour, alpha=0.15)
