"""Sections of a study's page beyond losses: tests, equal losses, routers, generation."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from html import escape

from megatron_blackmamba.report import html
from megatron_blackmamba.report.charts import short
from megatron_blackmamba.study import differences, fits
from megatron_blackmamba.study.points import Evidence, Point, chosen, unique
from megatron_blackmamba.study.results import mean_of
from megatron_blackmamba.study.routing import MEANING

TUNED = ", each at its best learning rate"


def comparisons(points: Sequence[Point], first: str, where: str = "") -> str:
    """Show a test for each comparison that three seeds have."""
    rows = [
        [f"{first} − {one.other}", one.size, f"{one.mean:+.3f}", _each(one.by_seed, "+.3f"), f"{one.p:.2g}"]
        + [f"{one.adjusted:.2g}"]
        for one in differences.comparisons(points, first)
    ]
    words = (
        f"A seed's mean difference over its budgets of at least {differences.TESTED_FROM:g} tokens per parameter,"
        " and Student's t over the seeds. The last column allows for the number of tests (Holm)."
    )
    return _section(f"Tests{where}", words, ("comparison", "size", "mean", "by seed", "p", "p, adjusted"), rows)


def equal_losses(points: Sequence[Point], first: str, where: str = "") -> str:
    """Show what other variants must spend for the same loss."""
    rows = []
    for size in unique(points, "size"):
        for other in [each for each in unique(points, "variant") if each != first]:
            for equal in differences.equal_losses(points, first, other, size):
                ratio, at = statistics.geometric_mean(equal.by_seed.values()), equal.difference
                mean = f"{'> ' if equal.bounds else ''}{ratio:.2f}"
                each = _each(equal.by_seed, ".2f", equal.bounds)
                rows.append([other, size, short(at.budget), f"{at.per_parameter:.1f}", mean, each])
    words = (
        f"Training FLOPs of another variant, over those of {first}, at which its curve reaches the same loss."
        " Above 1, it needs more. Nothing is extrapolated: > marks a seed whose curve ends above the loss."
    )
    columns = ("variant", "size", "budget", "tokens per parameter", "FLOPs for the same loss", "by seed")
    return _section(f"Equal losses{where}", words, columns, rows)


def tuned(points: Sequence[Point], first: str) -> str:
    """Compare the variants at the best learning rate tried for each, where two or more were."""
    best, some, rows = fits.best_rates(points), fits.at_best_rates(points), []
    for size in unique(some, "size"):
        for other in [each for each in unique(some, "variant") if each != first]:
            for at in fits.differences(some, first, other, size):
                pair = best[first, size], best[other, size]
                rates = [f"{own.lowest:.2g}" + " (edge)" * own.at_edge for own in pair]
                where = [f"{first} − {other}", size, short(at.budget), f"{at.per_parameter:.1f}"]
                rows.append([*where, *rates, str(len(at.values)), mean_of(at.values, "+")])
    words = (
        f"Each variant at the learning rate tried with which its loss is lowest, on average over its {fits.LARGEST}"
        " largest budgets and the seeds that have all rates. Edge: it is the smallest or largest one tried up to there,"
        " and a better one may lie beyond."
    )
    columns = (
        "comparison", "size", "budget", "tokens per parameter", "rate of the first", "of the other", "seeds",
        "difference",
    )  # fmt: skip
    return _section(f"Differences{TUNED}", words, columns, rows)


def routers(points: Sequence[Point]) -> str:
    """Show what the routers do, where that has been measured."""
    rows = [
        [p.variant, p.size, short(p.budget), str(p.seed)]
        + [f"{p.router[name]:.3f}" if name in p.router else "–" for name in MEANING]
        for p in points
        if p.router
    ]
    words = " ".join(f"<b>{name}</b>: {escape(meaning)}." for name, meaning in MEANING.items())
    return _section("Routers", words, ("variant", "size", "budget", "seed", *MEANING), rows)


def generation(evidence: Evidence) -> str:
    """Show what a generated token costs beside the loss."""
    rows = []
    for one in evidence.generation:
        some = chosen(evidence.plain, variant=one["group"], size=one["size"])
        if some and (last := max(p.budget for p in some)):
            loss = statistics.fmean(p.loss for p in some if p.budget == last)
            times = f"{min(one['milliseconds']):.2f} to {max(one['milliseconds']):.2f}"
            state = " to ".join(f"{size:,}" for size in dict.fromkeys((one["bytes"][0], one["bytes"][-1])))
            rows.append(
                [one["group"], one["size"], short(last), f"{loss:.3f}", times, state, short(some[0].parameters)]
                + [short(some[0].active)]
            )
    lengths = evidence.generation[0]["lengths"] if evidence.generation else (0, 0)
    words = (
        f"Milliseconds for a token, after {lengths[0]} to {lengths[-1]} tokens, of one sequence in fp32 on the machine"
        " that wrote this, and bytes of the state. Parameters must be held in memory; only active ones are read."
    )
    columns = (
        "variant",
        "size",
        "largest budget",
        "its loss",
        "ms per token",
        "bytes of state",
        "parameters",
        "active",
    )
    return _section("Generation", words, columns, rows)


def _each(by_seed: Mapping[int, float], how: str, bounds: Collection[int] = ()) -> str:
    return ", ".join(f"{seed}: {'> ' if seed in bounds else ''}{value:{how}}" for seed, value in by_seed.items())


def _section(title: str, words: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"<section><h2>{title}</h2><p>{words}</p>{html.table(columns, rows)}</section>" if rows else ""
