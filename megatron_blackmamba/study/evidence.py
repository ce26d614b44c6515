"""The page and the summary of a study with trunks and branches, made from its points alone."""

import statistics
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from megatron_blackmamba.report import charts, html
from megatron_blackmamba.report.charts import Line, short
from megatron_blackmamba.study import differences, evidence_why, fits
from megatron_blackmamba.study.config import PrimaryConfig
from megatron_blackmamba.study.corpus import SOURCES
from megatron_blackmamba.study.points import Evidence, Point, chosen, unique
from megatron_blackmamba.study.results import mean_of

COLUMNS = (
    "variant", "size", "budget", "seeds", "parameters", "active", "tokens per parameter", "FLOPs", "loss",
    "bits per byte", "unseen set", "busiest expert in training", "repeated tokens",
)  # fmt: skip


def summary(evidence: Evidence) -> list[str]:
    """Return what the points say so far: a line for each comparison with the first variant."""
    points, tuned, first = evidence.plain, fits.at_best_rates(evidence.points), evidence.first
    hours = sum(point.seconds for point in evidence.points) / 3600
    said = [f"{len(evidence.points)} of {evidence.planned} planned points are finished, {hours:.1f} hours of steps."]
    for some, where in ((tuned, evidence_why.TUNED), (points, "")):
        said += _compared(some, first, where)
    return said


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
        name = f"{first} − {other}"
        for size in unique(points, "size"):
            if cross := fits.crossing(points, first, other, size):
                last = fits.differences(points, first, other, size)[-1]
                at = f"at {last.per_parameter:.1f} tokens per parameter, the largest budget"
                yield f"{name}, size {size}{where}: {_signed(last)} {at}; {_crossing(cross)}."


def _signed(difference: fits.Difference) -> str:
    seeds = len(difference.values)
    return f"{mean_of(difference.values, '+')} ({f'{seeds} seeds' if seeds > 1 else 'one seed'})"


def _crossing(cross: fits.Crossing) -> str:
    parts, seeds = [], len(cross.by_seed) + cross.never + cross.always
    if cross.by_seed:
        band = cross.band
        said = f" (95% interval {band[0]:.1f} to {band[1]:.1f})" if band else ""
        parts.append(f"the sign turns at {cross.mean:.1f}{said} in {len(cross.by_seed)} of {seeds} seeds")
    if cross.never:
        parts.append(f"still positive in {cross.never} of {seeds} seeds")
    if cross.always:
        parts.append(f"negative at every budget in {cross.always} of {seeds} seeds")
    return ", ".join(parts)


def render(evidence: Evidence) -> str:
    """Return the page as one string of HTML."""
    points, tuned = evidence.plain, fits.at_best_rates(evidence.points)
    header = f"<h1>Study: {escape(evidence.name)}</h1><p>{escape(evidence.about)}</p>"
    sections = [
        "<section><h2>So far</h2>" + "".join(f"<p>{escape(line)}</p>" for line in summary(evidence)) + "</section>",
        html.section("Differences", [*_differences(evidence)], "Below zero, the first variant is better. Bands are 95%"
                     " confidence intervals over the seeds. The variants of a seed share the order of the data."),
        html.section("Loss over training FLOPs", [*_losses(points)], "Means over the seeds; dashed: the fitted law."),
        evidence_why.tuned(evidence.points, evidence.first),
        evidence_why.comparisons(tuned, evidence.first, evidence_why.TUNED),
        evidence_why.equal_losses(tuned, evidence.first, evidence_why.TUNED),
        evidence_why.comparisons(points, evidence.first),
        evidence_why.equal_losses(points, evidence.first),
        evidence_why.routers(points),
        evidence_why.generation(evidence),
        _points(points),
        _laws(points),
        html.section("Residuals", [*_residuals(points)], "Loss less the law with an offset, else the law without one."),
        _grids(evidence.points),
        _corpus(evidence),
    ]  # fmt: skip
    words = f"Written by blackmamba study {escape(evidence.name)} --page."
    return html.page(f"{evidence.name} · BlackMamba study", header, [each for each in sections if each], words)


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
            if law := _best_fit(points, variant, size):
                curves.append(Line(f"{variant}, law", np.log10(spent), law.law.at(spent), colour=i, dashed=True))
        yield charts.lines(f"Validation loss, size {size}", curves, x_label="log10 of training FLOPs")


def _best_fit(points: Sequence[Point], variant: str, size: str) -> fits.Fit | None:
    return fits.fit(points, variant, size, True) or fits.fit(points, variant, size, False)


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


def _points(points: Sequence[Point]) -> str:
    rows = []
    for size in unique(points, "size"):
        for budget in sorted({p.budget for p in points if p.size == size}):
            for variant in unique(points, "variant"):
                if at := chosen(points, variant=variant, size=size, budget=budget):
                    rows.append(_row(at))
    words = "Means over the seeds. Losses are in nats per token. Equal budgets are equal training FLOPs."
    return f"<section><h2>Points</h2><p>{words}</p>{html.table(COLUMNS, rows)}</section>"


def _row(at: Sequence[Point]) -> list[str]:
    one = at[0]
    busiest = [p.busiest for p in at if p.busiest is not None]
    sets = [*one.validation]
    return [
        one.variant,
        one.size,
        short(one.budget),
        ", ".join(str(p.seed) for p in at),
        short(one.parameters),
        short(one.active),
        f"{one.tokens / one.parameters:.2f}",
        f"{one.flops:.2e}",
        mean_of([p.loss for p in at]),
        " / ".join(f"{name} {statistics.fmean(p.bits_per_byte[name] for p in at):.3f}" for name in sets),
        _unseen(at),
        f"{statistics.fmean(busiest):.2f}" if busiest else "–",
        short(one.repeated),
    ]


def _unseen(at: Sequence[Point]) -> str:
    names = [name for name in at[0].validation if name not in SOURCES]
    return " / ".join(f"{name} {statistics.fmean(p.validation[name] for p in at):.3f}" for name in names) or "–"


def _laws(points: Sequence[Point]) -> str:
    rows = []
    for size in unique(points, "size"):
        for variant in unique(points, "variant"):
            for offset in (False, True):
                if found := fits.fit(points, variant, size, offset):
                    half = found.exponent_interval
                    rows.append(
                        [
                            variant,
                            size,
                            f"{found.law.offset:.3f}" if offset else "none",
                            f"{found.law.exponent:.4f}" + ("" if half is None else f" ± {half:.4f}"),
                            f"{max(abs(v) for each in found.residuals.values() for v in each):.4f}",
                            _misfit(found),
                        ]
                    )
    columns = ("variant", "size", "offset", "exponent", "largest residual", "do the points fit?")
    words = (
        "loss = offset + factor × FLOPs^-exponent for one model size; ± is the 95% interval over fits of single seeds."
        " A law holds inside the budgets that it was fitted to, and says nothing about larger models."
    )
    return f"<section><h2>Power laws</h2><p>{words}</p>{html.table(columns, rows)}</section>" if rows else ""


def _misfit(found: fits.Fit) -> str:
    if found.seeds < 2:
        return "unknown: one seed"
    misfits = ", ".join(short(budget) for budget in found.misfits)
    return f"no, at {misfits} they lie off it by more than the seeds differ" if misfits else "yes"


def _residuals(points: Sequence[Point]) -> Iterator[str]:
    for size in unique(points, "size"):
        curves = []
        for i, variant in enumerate(unique(points, "variant")):
            if found := _best_fit(points, variant, size):
                budgets = sorted(found.residuals)
                means = [statistics.fmean(found.residuals[budget]) for budget in budgets]
                curves.append(Line(variant, np.log10(budgets), means, colour=i, thin=i >= charts.COLOURS))
        if curves:
            yield charts.lines(f"Residuals, size {size}", curves, x_label="log10 of the budget in tokens")


def _grids(points: Sequence[Point]) -> str:
    """Show what each value of a grid's key gives, and the best one as a function of compute."""
    drawn = []
    for key in dict.fromkeys(key for point in points for key in point.changed):
        best, rows = fits.best_values(points, key), []
        for each in best:
            tried = ", ".join(f"{value:g}: {loss:.3f}" for value, loss in each.tried.items())
            where = f"{each.value:.2g}" + (" (edge of the grid)" if each.at_edge else "")
            cost = "–" if each.twice is None else f"{each.twice:+.3f}"
            rows.append([each.variant, each.size, f"{each.flops:.1e}", tried, where, f"{each.loss:.3f}", cost])
        columns = ("variant", "size", "FLOPs", "loss at each value", "best value", "its loss", "cost of twice or half")
        words = "".join(f"<p>{escape(line)}</p>" for line in _over_flops(best))
        if rows:
            drawn.append(f"<section><h2>{escape(key)}</h2>{words}{html.table(columns, rows)}</section>")
    return "".join([*drawn, _changes(points)])


def _over_flops(best: Sequence[fits.Best]) -> Iterator[str]:
    for variant, size in dict.fromkeys((each.variant, each.size) for each in best):
        own = [each for each in best if (each.variant, each.size) == (variant, size)]
        if (slope := fits.over_flops(own)) is not None:
            yield f"{variant}, size {size}: the best value follows FLOPs^{slope:.2f} over {len(own)} budgets."


def _changes(points: Sequence[Point]) -> str:
    plain = {(p.variant, p.size, p.seed, p.budget): p.loss for p in points if p.plain}
    alike: dict[tuple[str, str, str, int], list[Point]] = {}
    for point in (p for p in points if not p.plain):
        said = ", ".join(f"{key}={value}" for key, value in point.changed.items())
        alike.setdefault((point.variant, point.size, said, point.budget), []).append(point)
    rows = []
    for (variant, size, said, budget), at in alike.items():
        before = [plain.get((variant, size, p.seed, budget)) for p in at]
        less = [p.loss - loss for p, loss in zip(at, before, strict=True) if loss is not None]
        seeds = ", ".join(str(p.seed) for p in at)
        loss = f"{statistics.fmean(p.loss for p in at):.3f}"
        rows.append([variant, size, short(budget), said, seeds, loss, mean_of(less, "+") if less else "–"])
    columns = ("variant", "size", "budget", "changes", "seeds", "loss", "less that without changes")
    words = "Means over the seeds; differences are taken seed by seed."
    return f"<section><h2>Grids</h2><p>{words}</p>{html.table(columns, rows)}</section>" if rows else ""


def _corpus(evidence: Evidence) -> str:
    rows = [
        [source, part, f"{counts['documents']:,}", f"{counts['bytes'] / 1e6:.1f} MB", f"{counts.get('tokens', 0):,}"]
        for source, parts in evidence.corpus.items()
        for part, counts in parts.items()
        if part in ("train", "validation")
    ]
    return f"<section><h2>Corpus</h2>{html.table(('source', 'part', 'documents', 'bytes', 'tokens'), rows)}</section>"
