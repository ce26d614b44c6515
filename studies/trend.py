"""The page, the summary and the picture of a study on trunks and branches, made from its points alone."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape

from megatron_blackmamba.report import charts, html
from megatron_blackmamba.report.charts import Chart, Line, Lines, short
from megatron_blackmamba.study.confidence import mean_of
from megatron_blackmamba.study.config import PrimaryConfig
from megatron_blackmamba.study.page import Report
from megatron_blackmamba.study.points import Evidence, Point, chosen, sealed, unique
from megatron_blackmamba.study.runs import Study
from megatron_blackmamba.study.table import Table
from studies import differences, fits, picture, routing, tables
from studies.picture import curve_of, zero

measure = routing.measure


def report(study: Study, found: Evidence) -> Report:
    """Return what the points say; nothing of the declared comparisons before all of their seeds are finished."""
    pictured, primary = study.config.pictured, study.config.primary
    shown = replace(found, points=tuple(sealed(found.points, primary)))
    subjects = [each for each in pictured if any(p.variant == each and p.parameters > p.active for p in found.points)]
    first, *lines = summary(shown)
    said = "".join(f"<p>{escape(line)}</p>" for line in (first, *lines))
    parts: list[str | Table] = [
        f"<section><h2>So far</h2>{said}</section>",
        html.section("Differences", [*_differences(shown)], "Below zero, the first variant is better. Bands are 95%"
                     " confidence intervals over the seeds. The variants of a seed share the order of the data."),
        html.section("Loss over training FLOPs", [*_losses(shown.plain)], "Means over the seeds."),
        *tables.every(shown, subjects or [found.first]),
    ]  # fmt: skip
    decided = decisions(found, primary)
    return Report([progress(found), *lines, *decided], parts, {found.name: picture.charts(shown, pictured)})


def summary(evidence: Evidence) -> list[str]:
    """Return what the points say so far: a line for each comparison with the first variant."""
    points, tuned, first = evidence.plain, fits.at_best_rates(evidence.points), evidence.first
    said = [progress(evidence)]
    for some, where in ((tuned, tables.TUNED), (points, "")):
        said += _compared(fits.with_next_size(some), first, where)
    return said


def progress(evidence: Evidence) -> str:
    """Return a line about how many points are finished."""
    hours = sum(point.seconds for point in evidence.points) / 3600
    return f"{len(evidence.points)} of {evidence.planned} planned points are finished, {hours:.1f} hours of steps."


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


def _compared(points: Sequence[Point], first: str, where: str) -> Iterator[str]:
    """Yield a line for each comparison."""
    for other in [each for each in unique(points, "variant") if each != first]:
        for size in unique(points, "size"):
            if cross := fits.crossing(points, first, other, size):
                last = fits.differences(points, first, other, size)[-1]
                at = f"at {last.per_parameter:.1f} tokens per parameter, the largest budget"
                yield f"{first} − {other}, size {size}{where}: {_signed(last)} {at}; {_crossing(cross)}."


def _signed(difference: fits.Difference) -> str:
    seeds = len(difference.values)
    return f"{mean_of(difference.values, '+')} ({f'{seeds} seeds' if seeds > 1 else 'one seed'})"


def _crossing(cross: fits.Crossing) -> str:
    parts, seeds = [], len(cross.by_seed) + cross.never + cross.always
    if cross.by_seed:
        said = f" (95% interval {cross.band[0]:.1f} to {cross.band[1]:.1f})" if cross.band else ""
        sign = "" if cross.better_after else " to positive"
        parts.append(f"the sign turns{sign} at {cross.mean:.1f}{said} in {len(cross.by_seed)} of {seeds} seeds")
    if cross.never:
        parts.append(f"positive at the end in {cross.never} of {seeds} seeds")
    if cross.always:
        parts.append(f"negative at the end in {cross.always} of {seeds} seeds")
    return ", ".join(parts)


def _means(points: Sequence[Point], field: str = "loss") -> tuple[list[float], list[float]]:
    """Return FLOPs and the mean of a field at each budget."""
    budgets = sorted(unique(points, "budget"))
    at = [chosen(points, budget=budget) for budget in budgets]
    return [some[0].flops for some in at], [statistics.fmean(getattr(p, field) for p in some) for some in at]


def _losses(points: Sequence[Point]) -> Iterator[Chart]:
    for size in unique(points, "size"):
        curves = []
        for i, variant in enumerate(unique(points, "variant")):
            spent, losses = _means(chosen(points, variant=variant, size=size))
            curves.append(Line(variant, spent, losses, colour=i, thin=i >= charts.COLOURS))
        yield Lines(f"Validation loss, size {size}", curves, x_label="training FLOPs", log=True)


def _differences(evidence: Evidence) -> Iterator[Chart]:
    points = evidence.plain
    for i, other in enumerate(unique(points, "variant")):
        curves = []
        for j, size in enumerate(unique(points, "size")):
            found = fits.differences(points, evidence.first, other, size)
            one_seed = all(len(each.values) == 1 for each in found)
            name = f"size {size}" + (", one seed" if one_seed else "")
            curves.append(curve_of(name, found, colour=j, thin=one_seed))
        if i and any(len(curve.x) for curve in curves):
            label = "tokens per parameter"
            yield Lines(f"{evidence.first} − {other}", [*curves, *zero(curves)], x_label=label, log=True)
