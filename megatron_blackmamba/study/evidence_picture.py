"""The picture of a study with trunks and branches: what experts give, and what the router costs."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_blackmamba.report.pictures import picture
from megatron_blackmamba.study import fits
from megatron_blackmamba.study.points import Evidence, Point, chosen, unique

LINES = ("solid", "dashed", "dotted", "dashdot")
SEEDS_OF_A_BAND = 3
"""With two seeds Student's factor is 12.7, and the band would hide the lines."""
TICKS = [mantissa * 10.0**power for power in range(-2, 5) for mantissa in (1, 2, 5)]
EQUAL = 0.06
"""Largest relative difference of parameters, or of FLOPs per token, that counts as equal."""


def write_picture(evidence: Evidence, folder: Path) -> Path | None:
    """Write NAME.png: differences from models without experts, and from the same model with other routers.

    Variants may want other learning rates: the best one tried for each counts, if enough seeds have it. A side without
    points is left out; without any, there is no picture.
    """
    points, first = evidence.plain, evidence.first
    titles = ("What experts give: against models without", f"What the router {_plain(first)} costs: against others")
    sides = [
        (_with_most_seeds(points, others), title)
        for others, title in zip(kinds_of_others(points, first), titles, strict=True)
        if others
    ]
    if not sides:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return picture(folder / f"{evidence.name}.png", partial(_draw, evidence, sides), columns=len(sides))


def _draw(evidence: Evidence, sides: Sequence[tuple[list[str], str]], axes: Any) -> bool:
    first, tuned, colour = evidence.first, fits.at_best_rates(evidence.points), 0
    places = np.atleast_1d(axes)
    for place, (others, title) in zip(places, sides, strict=True):
        if min(len(unique(chosen(tuned, variant=each), "seed")) for each in (first, *others)) >= SEEDS_OF_A_BAND:
            _panel(place, tuned, first, others, colour, f"{title}, each at its best rate")
        else:
            _panel(place, evidence.plain, first, others, colour, title)
        colour += len(others)
    lows, highs = zip(*(place.get_ylim() for place in places), strict=True)
    for place in places:  # one scale: heights on the left and on the right compare
        place.set_ylim(min(lows), max(highs))
    places[0].set_ylabel(f"loss of {_plain(first)} less the other's, in nats")
    return True


def _panel(place: Any, points: Sequence[Point], first: str, others: Sequence[str], colour: int, title: str) -> None:
    """Draw the differences from some variants, in colours from a number on."""
    styles = dict(zip(_by_parameters(points, first), LINES, strict=False))
    drawn = {
        size
        for number, other in enumerate(others, colour)
        for size in _differences(place, points, first, other, f"C{number}", styles)
    }
    for size, style in styles.items():
        if size in drawn:
            own = chosen(points, variant=first, size=size)
            label = f"{own[0].parameters / 1e6:.2g}M parameters ({_seeds(len(unique(own, 'seed')))})"
            place.plot([], [], color="black", linestyle=style, label=label)
    place.axhline(0, color="black", linewidth=0.8)
    place.set(xscale="log", xlabel="training tokens per parameter")
    place.set_title(title, fontsize="medium")
    low, high = place.get_xlim()
    place.set_xticks([tick for tick in TICKS if low <= tick <= high])
    place.xaxis.set_major_formatter("{x:g}")
    place.xaxis.set_minor_formatter("")
    place.legend(frameon=False, fontsize="small")
    for height, word in ((0.97, "worse ↑"), (0.03, "better ↓")):
        where = {"ha": "right", "va": "center", "transform": place.transAxes, "fontsize": "small"}
        place.text(0.99, height, f"{_plain(first)} is {word}", **where)


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _seeds(number: int) -> str:
    if number == 1:
        return "1 seed"
    return f"{number} seeds" + (", band: 95%" if number >= SEEDS_OF_A_BAND else "")


def kinds_of_others(points: Sequence[Point], first: str) -> tuple[list[str], list[str]]:
    """Return the variants without experts of equal FLOPs per token, and those that differ in the router alone."""
    dense, routed = [], []
    for other in unique(points, "variant"):
        pairs = [(p, q) for p in chosen(points, variant=other) for q in chosen(points, variant=first, size=p.size)][:1]
        if other == first or not pairs:
            continue
        (theirs, ours) = pairs[0]
        if theirs.parameters == theirs.active and _near(theirs.flops / theirs.tokens, ours.flops / ours.tokens):
            dense.append(other)
        elif (theirs.parameters, theirs.active) == (ours.parameters, ours.active):
            routed.append(other)
    return dense, routed


def _with_most_seeds(points: Sequence[Point], others: Sequence[str]) -> list[str]:
    """Return the variants that have enough seeds for a band; all of them if none has."""
    seeds = {other: len(unique(chosen(points, variant=other), "seed")) for other in others}
    return [other for other in others if seeds[other] >= SEEDS_OF_A_BAND] or list(others)


def _near(one: float, other: float) -> bool:
    return abs(one / other - 1) < EQUAL


def _by_parameters(points: Sequence[Point], first: str) -> list[str]:
    """Return the sizes of the first variant, the smallest model first."""
    sizes = {p.size: p.parameters for p in chosen(points, variant=first)}
    return sorted(sizes, key=lambda size: sizes[size])


def _differences(
    place: Any, points: Sequence[Point], first: str, other: str, colour: str, styles: Mapping[str, str]
) -> list[str]:
    """Draw the differences from a variant, and return the sizes that have some."""
    drawn = []
    for size, style in styles.items():
        if found := fits.differences(points, first, other, size):
            x, mean = [each.per_parameter for each in found], np.array([each.mean for each in found])
            half = np.array([each.interval if len(each.values) >= SEEDS_OF_A_BAND else np.nan for each in found])
            place.plot(x, mean, color=colour, linestyle=style, marker=".", linewidth=1.2)
            place.fill_between(x, mean - half, mean + half, color=colour, alpha=0.12)
            drawn.append(size)
    place.plot([], [], color=colour, label=f"against {_plain(other)}")
    return drawn
