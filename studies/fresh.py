"""Tables over the seeds that chose no learning rate: the best model with experts, and what each part of it gives."""

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
    """Order the models with experts by their loss at the largest budget of each size, and say which are worse."""
    rows = []
    for size in unique(points, "size"):
        here = [p for p in chosen(points, size=size) if p.parameters > p.active]
        last = chosen(here, budget=max((p.budget for p in here), default=0))
        by_variant = {each: {p.seed: p.loss for p in chosen(last, variant=each)} for each in unique(last, "variant")}
        most = max(map(len, by_variant.values()), default=0)
        order = sorted(by_variant, key=lambda v: (len(by_variant[v]) < most, statistics.fmean(by_variant[v].values())))
        for each in order if len(order) > 1 else ():
            own, best = by_variant[each], by_variant[order[0]]
            less = [loss - best[seed] for seed, loss in own.items() if seed in best]
            above = ["–", "lowest"] if each == order[0] else [mean_of(less, "+") if less else "–", _verdict(less)]
            above = above if len(own) == most else [above[0], "waits for seeds"]
            rows.append([size, short(last[0].budget), str(len(own)), each, mean_of([*own.values()]), *above])
    words = (
        "Mean loss at the largest budget, lowest first. Open: the 95% interval of the difference from the lowest"
        " contains zero. It does not allow for the number of variants."
    )
    columns = ("size", "budget", "seeds", "variant", "loss", "above the lowest", "")
    return Table(f"Models with experts by loss{WHERE}", words, columns, rows)


def _verdict(above: Sequence[float]) -> str:
    half = half_interval(above)
    return "worse" if half is not None and statistics.fmean(above) > half else "open"


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
    return Table(f"Parts of a model{WHERE}", words, ("part", "size", "budget", "seeds", "differences", "mean"), rows)
