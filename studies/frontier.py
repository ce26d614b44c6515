"""The lowest loss at equal training FLOPs over the sizes tried, of models with experts and of dense ones."""

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

from megatron_blackmamba.report.confidence import mean_of
from megatron_blackmamba.study.grids import choosing
from megatron_blackmamba.study.points import Point, unique
from megatron_blackmamba.study.table import Table
from studies.fits import at_best_rates, loss_at
from studies.fresh import WHERE

WHOLE_BATCHES = 0.005
"""By how much FLOPs of one budget may differ between models, since a budget is whole batches."""
FEWEST = 3
"""Seeds that measure a difference."""

Model = tuple[str, str]
"""Variant and size."""


def sizes(points: Sequence[Point], first: str) -> Table:
    """Compare each size of a variant with the best dense model, at the FLOPs of each of its budgets.

    The seeds that chose the rates choose the best models too, so that the others do not measure their own choice.
    """
    tuned = at_best_rates(points)
    chose = set().union(*(choosing(points, size) for size in unique(points, "size")))
    curves: dict[Model, dict[int, dict[float, float]]] = {}
    for p in tuned:
        curves.setdefault((p.variant, p.size), {}).setdefault(p.seed, {})[p.flops] = p.loss
    parameters = {(p.variant, p.size): p.parameters for p in tuned}
    experts = {p.variant for p in tuned if p.parameters > p.active}
    rows, own = [], [p for p in tuned if p.variant == first and first in experts]
    for flops in sorted(unique(own, "flops")) if len(unique(own, "size")) > 1 else ():
        at = {model: _losses_at(by_seed, flops) for model, by_seed in curves.items()}
        at = {model: losses for model, losses in at.items() if len(losses.keys() - chose) >= FEWEST}
        ours = _means([model for model in at if model[0] == first], at, chose)
        dense = _means([model for model in at if model[0] not in experts], at, chose)
        for model in ours if dense else ():
            best = min(dense, key=lambda each: dense[each])
            less = [loss - at[best][seed] for seed, loss in at[model].items() if seed not in chose and seed in at[best]]
            names = (_name(model, ours, parameters), _name(best, dense, parameters))
            said = "best size" if ours[model] == min(ours.values()) else ""
            rows.append([f"{flops:.1e}", *names, str(len(less)), mean_of(less, "+"), said])
    words = (
        f"Loss of {first} less that of the dense model that has the lowest loss of those with as many FLOPs, of any"
        " size. In brackets, the parameters; the largest model with these FLOPs is marked, since a larger one may be"
        " better. Losses between budgets are interpolated. The seeds that chose rates chose the best models too."
    )
    columns = ("FLOPs", first, "best dense", "seeds", "difference", f"of {first}")
    return Table(f"{first} and the best dense model{WHERE}", words, columns, rows)


def _losses_at(by_seed: Mapping[int, Mapping[float, float]], flops: float) -> dict[int, float]:
    found = {seed: loss_at(curve, flops, WHOLE_BATCHES) for seed, curve in by_seed.items()}
    return {seed: loss for seed, loss in found.items() if loss is not None}


def _means(models: Iterable[Model], at: Mapping[Model, Mapping[int, float]], chose: set[int]) -> dict[Model, float]:
    """Return the mean loss over the choosing seeds, of the models that have any."""
    losses = {model: [loss for seed, loss in at[model].items() if seed in chose] for model in models}
    return {model: statistics.fmean(own) for model, own in losses.items() if own}


def _name(model: Model, others: Collection[Model], parameters: Mapping[Model, int]) -> str:
    largest = len(others) > 1 and parameters[model] == max(parameters[each] for each in others)
    return f"{model[0]}, {model[1]} ({parameters[model]:,}{', largest' if largest else ''})"
