"""Tables over the seeds that chose no learning rate: the best models, and what each part of them gives."""

import itertools
import statistics
from collections.abc import Mapping, Sequence

from megatron_blackmamba.report.charts import short
from megatron_blackmamba.report.confidence import mean_of, side_of
from megatron_blackmamba.study.grids import choosing
from megatron_blackmamba.study.points import Point, chosen, unique
from megatron_blackmamba.study.table import Table
from studies.fits import at_best_rates, differences

WHERE = ", at best rates, by seeds that chose none"


def at_fresh_seeds(points: Sequence[Point]) -> list[Point]:
    """Return the points at the best learning rates of seeds that no variant of their size has tried rates with."""
    chose = {size: choosing(points, size) for size in unique(points, "size")}
    return [p for p in at_best_rates(points) if p.seed not in chose[p.size]]


def ranked(points: Sequence[Point]) -> Table:
    """Order the models with experts by their loss at the largest budget of each size, and say which are worse."""
    rows = []
    for size in unique(points, "size"):
        here = [p for p in chosen(points, size=size) if p.parameters > p.active]
        last = chosen(here, budget=max((p.budget for p in here), default=0))
        losses = {variant: [p.loss for p in chosen(last, variant=variant)] for variant in unique(last, "variant")}
        most = max(map(len, losses.values()), default=0)
        order = sorted(losses, key=lambda variant: (len(losses[variant]) < most, statistics.fmean(losses[variant])))
        for variant in order if len(order) > 1 else ():
            own = losses[variant]
            less = [value for d in differences(last, variant, order[0], size) for value in d.values]
            said = "worse" if side_of(less) > 0 else "open"
            said = "lowest" if variant == order[0] else said if len(own) == most else "waits for seeds"
            above = mean_of(less, "+") if less and variant != order[0] else "–"
            rows.append([size, short(last[0].budget), str(len(own)), variant, mean_of(own), above, said])
    words = (
        "Mean loss at the largest budget, lowest first. Open: the 95% interval of the difference from the lowest"
        " contains zero. It does not allow for the number of variants."
    )
    columns = ("size", "budget", "seeds", "variant", "loss", "above the lowest", "")
    return Table(f"Models with experts by loss{WHERE}", words, columns, rows)


def parts(points: Sequence[Point], declared: Mapping[str, Sequence[tuple[str, str]]]) -> Table:
    """Show the mean of two differences, each of variants that differ in one part alone."""
    rows, known = [], {(p.variant, p.size, p.budget, p.seed) for p in points}
    for part, pairs in declared.items():
        variants = set(itertools.chain(*pairs))
        whole = [p for p in points if all((each, p.size, p.budget, p.seed) in known for each in variants)]
        for size in unique(whole, "size"):
            for at in zip(*(differences(whole, one, other, size) for one, other in pairs), strict=True):
                each = ", ".join(
                    f"{one} − {other}: {mean_of(d.values, '+')}" for (one, other), d in zip(pairs, at, strict=True)
                )
                means = [statistics.fmean(of_seed) for of_seed in zip(*(d.values for d in at), strict=True)]
                rows.append([part, size, short(at[0].budget), str(len(means)), each, mean_of(means, "+")])
    words = "Each difference is of two variants that differ in this part alone; their mean is taken seed by seed."
    return Table(f"Parts of a model{WHERE}", words, ("part", "size", "budget", "seeds", "differences", "mean"), rows)
