"""The page, the summary and the picture of a study on trunks and branches, made from its points alone."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from megatron_blackmamba.report import charts, html
from megatron_blackmamba.report.charts import Chart, Line, Lines, short
from megatron_blackmamba.report.confidence import mean_of, side_of
from megatron_blackmamba.study.config import PrimaryConfig
from megatron_blackmamba.study.page import Report
from megatron_blackmamba.study.points import Evidence, Point, chosen, sealed, unique
from megatron_blackmamba.study.runs import Study
from megatron_blackmamba.study.table import Table
from studies import differences, fits, fresh, frontier, picture, routing, tables
from studies.picture import curve_of, mean_curve, zero

measure = routing.measure


def report(study: Study, found: Evidence) -> Report:
    """Return what the points say; nothing of the declared comparisons before all of their seeds are finished."""
    pictured, primary = study.config.pictured, study.config.primary
    shown = replace(found, points=tuple(sealed(found.points, primary)))
    subjects = [each for each in pictured if any(p.variant == each and p.parameters > p.active for p in found.points)]
    ends, decided = compared(shown), [*decisions(found, primary)]
    lines = [*map(_in_words, ends)]
    several, alone = _differences(shown)
    sizes = frontier.charts(shown.points, found.first, pictured)
    more = html.folded("Variants of one seed", html.figures(alone)) if alone else ""
    in_words = html.folded(
        f"The {len(lines)} comparisons in words", "".join(f"<p>{escape(line)}</p>" for line in lines)
    )
    parts: list[str | Table] = [
        html.section("Answer", [*_forests(ends)], f"Mean loss of {found.first} less that of the other, at equal FLOPs"
                     f" and the largest budget: below zero, {found.first} is better. Bars are 95% confidence intervals"
                     " over the seeds; a dot without one is of one seed.") + in_words,
        html.section("Every size", sizes, "Means over the seeds that chose no learning rate, and 95% confidence"
                     " intervals.") if sizes else "",
        html.section("Differences", several, "Below zero, the first variant is better. Bands are 95%"
                     " confidence intervals over the seeds. The variants of a seed share the order of the data.")
        + more,
        html.section("Loss over training FLOPs", [*_losses(shown.plain)], "Means over the seeds."),
        *tables.every(shown, subjects or [found.first], study.config.parts),
    ]  # fmt: skip
    pictures = {found.name: sizes or picture.charts(shown, pictured)}
    return Report(
        [progress(found), *decided, *diverged(shown.points), *lines], parts, pictures, decided or [*_answers(ends)]
    )


@dataclass(frozen=True)
class Compared:
    """The first variant against another of one size, over the points that say most about the two."""

    first: str
    other: str
    size: str
    last: fits.Difference
    """At the largest budget."""
    cross: fits.Crossing
    where: str
    """Of which points."""


ONE_RATE = ", all at one learning rate"
TELLING = {fresh.WHERE: 3, tables.TUNED: 1, ONE_RATE: 1}
"""Sets of points, those that say most first → seeds that both variants need there."""


def compared(evidence: Evidence) -> list[Compared]:
    """Compare the first variant with each other once for a size, over the most telling points that both have."""
    found: dict[tuple[str, str], Compared] = {}
    sets = fresh.at_fresh_seeds(evidence.points), fits.at_best_rates(evidence.points), evidence.plain
    for some, (where, seeds) in zip(sets, TELLING.items(), strict=True):
        points, first = fits.with_next_size(some), evidence.first
        for other, size in itertools.product(unique(points, "variant"), unique(points, "size")):
            own = fits.differences(points, first, other, size)
            if own and other != first and (other, size) not in found and len(own[-1].values) >= seeds:
                ended = _with_budget(_with_budget(points, first, own[-1]), other, own[-1])
                if cross := fits.crossing(ended, first, other, size):
                    found[other, size] = Compared(first, other, size, own[-1], cross, where)
    return [*found.values()]


def _with_budget(points: Sequence[Point], variant: str, last: fits.Difference) -> list[Point]:
    """Return the points of the seeds with which a variant has reached a budget: the others may still turn."""
    seeds = {p.seed for p in chosen(points, variant=variant, size=last.size, budget=last.budget)}
    return [p for p in points if p.seed in seeds]


def _forests(ends: Sequence[Compared]) -> Iterator[Chart]:
    for where, group in itertools.groupby(ends, lambda each: each.where):
        found = sorted(group, key=lambda each: (each.size, each.last.mean))
        names = [f"{each.other}, {each.size}" for each in found]
        means, halves = [each.last.mean for each in found], [each.last.interval for each in found]
        title = f"Loss of {found[0].first} less that of others{where}"
        yield charts.Forest(title, names, means, halves, "difference of validation loss, nats per token", True)


def _answers(ends: Sequence[Compared]) -> Iterator[str]:
    """Yield how many comparisons with several seeds are clear, of those whose variants have their best rates."""
    at_best = [each for each in ends if each.where != ONE_RATE] or ends
    found = [each for each in at_best if each.last.interval is not None]
    for verdict, sign in (("better than", -1), ("worse than", 1)):
        if clear := [each for each in found if side_of(each.last.values) == sign]:
            said = ", ".join(f"{each.other} at size {each.size} ({mean_of(each.last.values, '+')})" for each in clear)
            yield f"{clear[0].first} is {verdict} {said}: 95% intervals, before allowing for their number (Tests)."


def progress(evidence: Evidence) -> str:
    """Return a line about how many points are finished."""
    hours = sum(point.seconds for point in evidence.points) / 3600
    return f"{len(evidence.points)} of {evidence.planned} planned points are finished, {hours:.1f} hours of steps."


def diverged(points: Sequence[Point]) -> Iterator[str]:
    """Yield which seeds a model has lost: a mean without them is that of the lucky ones."""
    lost: dict[tuple[str, str, float], set[int]] = {}
    for p in (p for p in points if not math.isfinite(p.loss)):
        lost.setdefault((p.variant, p.size, p.rate), set()).add(p.seed)
    for (variant, size, rate), seeds in lost.items():
        yield f"{variant}, size {size}, rate {rate:g} diverged with seeds {sorted(seeds)}: no mean has these losses."


def decisions(evidence: Evidence, primary: Sequence[PrimaryConfig]) -> Iterator[str]:
    """Yield what the declared comparisons say, and nothing of their losses before all seeds are finished."""
    for declared in primary:
        one = differences.decide(evidence.points, declared)
        sides = " − ".join(declared.sides)
        pair = f"Declared: {sides}, size {declared.size}, budget {short(declared.budget)}"
        yield f"{pair}: {len(one.losses)} of {len(declared.seeds)} seeds are finished: {one.verdict}."
        if len(one.losses) == len(declared.seeds):
            parts = ", ".join(f"{value:.1e}" for value in one.variances)
            yield f"The difference is {mean_of(one.differences, '+')}; variances of seeds and rests: {parts}."
            if declared.gain_on is None and (ratio := differences.flops_for_equal_loss(evidence.points, declared)):
                yield f"{declared.one} needs {ratio} of the FLOPs for the loss of {declared.other}."


def _in_words(one: Compared) -> str:
    values = one.last.values
    difference = f"{mean_of(values, '+')} ({f'{len(values)} seeds' if len(values) > 1 else 'one seed'})"
    at = f"at {one.last.per_parameter:.1f} tokens per parameter, the largest budget"
    return f"{one.first} − {one.other}, size {one.size}{one.where}: {difference} {at}; {_crossing(one.cross)}."


def _crossing(cross: fits.Crossing) -> str:
    parts, seeds = [], len(cross.by_seed) + cross.never + cross.always
    if cross.by_seed:
        said = f" (95% interval {cross.interval})" if cross.interval else ""
        sign = "" if cross.better_after else " to positive"
        parts.append(f"the sign turns{sign} at {cross.mean:.1f}{said} in {len(cross.by_seed)} of {seeds} seeds")
    if cross.never:
        parts.append(f"positive at the end in {cross.never} of {seeds} seeds")
    if cross.always:
        parts.append(f"negative at the end in {cross.always} of {seeds} seeds")
    return ", ".join(parts)


def _losses(points: Sequence[Point]) -> Iterator[Chart]:
    for size in unique(points, "size"):
        curves = []
        for i, variant in enumerate(unique(points, "variant")):
            spent, losses = mean_curve(chosen(points, variant=variant, size=size))
            curves.append(Line(variant, spent, losses, colour=i, thin=i >= charts.COLOURS))
        yield Lines(f"Size {size}, nats per token", curves, x_label="training FLOPs", log=True)


def _differences(evidence: Evidence) -> tuple[list[Chart], list[Chart]]:
    """Draw the differences from each other variant: of those with several seeds, and of the rest."""
    points, several, alone = evidence.plain, list[Chart](), list[Chart]()
    for i, other in enumerate(unique(points, "variant")):
        curves, seeds = [], 1
        for j, size in enumerate(unique(points, "size")):
            found = fits.differences(points, evidence.first, other, size)
            most = max((len(each.values) for each in found), default=0)
            seeds = max(seeds, most)
            name = f"size {size}" + (", one seed" if most == 1 else "")
            curves.append(curve_of(name, found, colour=j, thin=most == 1))
        if i and any(len(curve.x) for curve in curves):
            title = f"{evidence.first} − {other}, nats per token"
            chart = Lines(title, [*curves, *zero(curves)], x_label="tokens per parameter", log=True)
            (several if seeds > 1 else alone).append(chart)
    return several, alone
