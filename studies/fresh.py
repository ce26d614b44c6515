"""Tables over the seeds that chose no learning rate: the best router, and what each part of a router gives."""

import statistics
from collections.abc import Mapping, Sequence

from megatron_blackmamba.report.charts import short
from megatron_blackmamba.report.confidence import half_interval, mean_of
from megatron_blackmamba.study.grids import choosing
from megatron_blackmamba.study.points import Point, chosen, unique
from megatron_blackmamba.study.table import Table
from studies.fits import at_best_rates

WHERE = ", at best rates, by seeds that chose none"


def at_fresh_seeds(points: Sequence[Point]) -> list[Point]:
    """Return the points at the best learning rates of seeds that no variant of their size has tried rates with."""
    return [p for p in at_best_rates(points) if p.seed not in choosing(points, p.size)]


def ranked(points: Sequence[Point]) -> Table:
    """Order the models with experts by their loss at the largest budget of each size, and name the best."""
    rows = []
    for size in unique(points, "size"):
        here = [p for p in chosen(points, size=size) if p.parameters > p.active]
        last = chosen(here, budget=max((p.budget for p in here), default=0))
        by_variant = {each: {p.seed: p.loss for p in chosen(last, variant=each)} for each in unique(last, "variant")}
        seeds = {p.seed for p in last}
        whole = {each: losses for each, losses in by_variant.items() if losses.keys() == seeds}
        order = sorted(whole, key=lambda each: statistics.fmean(whole[each].values()))
        for each in order if len(order) > 1 else ():
            less = [whole[each][seed] - whole[order[0]][seed] for seed in sorted(seeds)]
            above = ["–", "best"] if each == order[0] else [mean_of(less, "+"), "worse" if _clear(less) else "level"]
            rows.append([size, short(last[0].budget), str(len(seeds)), each, mean_of([*whole[each].values()]), *above])
    words = (
        "Mean loss at the largest budget, lowest first. Level: the 95% interval of the difference from the best"
        " contains zero. Variants that lack one of the seeds are left out."
    )
    columns = ("size", "budget", "seeds", "variant", "loss", "above the best", "")
    return Table(f"Routers by loss{WHERE}", words, columns, rows)


def _clear(values: Sequence[float]) -> bool:
    half = half_interval(values)
    return half is not None and statistics.fmean(values) > half


def parts(points: Sequence[Point], declared: Mapping[str, Sequence[tuple[str, str]]]) -> Table:
    """Show the mean of two differences, each of variants that differ in one part alone."""
    rows = []
    for part, pairs in declared.items():
        for size in unique(points, "size"):
            losses = {(p.variant, p.budget, p.seed): p.loss for p in chosen(points, size=size)}
            for budget in sorted(unique(chosen(points, size=size), "budget")):
                seeds = [
                    seed
                    for seed in sorted(unique(points, "seed"))
                    if all((each, budget, seed) in losses for pair in pairs for each in pair)
                ]
                less = [[losses[one, budget, s] - losses[other, budget, s] for s in seeds] for one, other in pairs]
                mean = [statistics.fmean(each) for each in zip(*less, strict=True)]
                if seeds:
                    each = ", ".join(f"{a} − {b}: {mean_of(v, '+')}" for (a, b), v in zip(pairs, less, strict=True))
                    rows.append([part, size, short(budget), str(len(seeds)), each, mean_of(mean, "+")])
    words = "Each difference is of two variants that differ in this part alone; their mean is taken seed by seed."
    return Table(f"Parts of a router{WHERE}", words, ("part", "size", "budget", "seeds", "differences", "mean"), rows)
