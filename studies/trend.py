"""The page and the summary of a study with trunks and branches, made from its points alone."""

import statistics
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from megatron_blackmamba.report import charts, html
from megatron_blackmamba.report.charts import Line, short
from megatron_blackmamba.study.config import PrimaryConfig
from megatron_blackmamba.study.points import Evidence, Point, chosen, unique
from megatron_blackmamba.study.results import mean_of
from studies import differences, fits, tables


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
        pair = f"Declared: {declared.one} − {declared.other}, size {declared.size}, budget {short(declared.budget)}"
        yield f"{pair}: {len(one.losses)} of {len(declared.seeds)} seeds are finished: {one.verdict}."
        if len(one.losses) == len(declared.seeds):
            parts = ", ".join(f"{value:.1e}" for value in one.variances)
            yield f"The difference is {mean_of(one.differences, '+')}; variances of seeds and rests: {parts}."


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


def render(evidence: Evidence, subjects: Sequence[str] = ()) -> str:
    """Return the page as one string of HTML; subjects are compared with every variant, by default the first is."""
    header = f"<h1>Study: {escape(evidence.name)}</h1><p>{escape(evidence.about)}</p>"
    sections = [
        "<section><h2>So far</h2>" + "".join(f"<p>{escape(line)}</p>" for line in summary(evidence)) + "</section>",
        html.section("Differences", [*_differences(evidence)], "Below zero, the first variant is better. Bands are 95%"
                     " confidence intervals over the seeds. The variants of a seed share the order of the data."),
        html.section("Loss over training FLOPs", [*_losses(evidence.plain)], "Means over the seeds."),
        *(table.html() for table in tables.every(evidence, subjects or [evidence.first])),
    ]  # fmt: skip
    words = f"Written by blackmamba study {escape(evidence.name)} --page."
    return html.page(f"{evidence.name} · BlackMamba study", header, sections, words)


def _means(points: Sequence[Point], field: str = "loss") -> tuple[list[float], list[float]]:
    """Return FLOPs and the mean of a field at each budget."""
    budgets = sorted(unique(points, "budget"))
    at = [chosen(points, budget=budget) for budget in budgets]
    return [some[0].flops for some in at], [statistics.fmean(getattr(p, field) for p in some) for some in at]


def _losses(points: Sequence[Point]) -> Iterator[str]:
    for size in unique(points, "size"):
        curves = []
        for i, variant in enumerate(unique(points, "variant")):
            spent, losses = _means(chosen(points, variant=variant, size=size))
            curves.append(Line(variant, np.log10(spent), losses, colour=i, thin=i >= charts.COLOURS))
        yield charts.lines(f"Validation loss, size {size}", curves, x_label="log10 of training FLOPs")


def _differences(evidence: Evidence) -> Iterator[str]:
    points = evidence.plain
    for i, other in enumerate(unique(points, "variant")):
        curves = []
        for j, size in enumerate(unique(points, "size")):
            found = fits.differences(points, evidence.first, other, size)
            mean = np.array([each.mean for each in found])
            half = np.array([each.interval or 0.0 for each in found])
            x = np.log10([each.per_parameter for each in found])
            one_seed = all(len(each.values) == 1 for each in found)
            name = f"size {size}" + (", one seed" if one_seed else "")
            curves.append(Line(name, x, mean, mean - half, mean + half, colour=j, thin=one_seed))
        if i and (ends := [x for curve in curves for x in curve.x]):
            curves.append(Line("equal", [min(ends), max(ends)], [0.0, 0.0], colour=len(curves), dashed=True, thin=True))
            title, label = f"{evidence.first} − {other}", "log10 of tokens per parameter"
            yield charts.lines(title, curves, x_label=label)
