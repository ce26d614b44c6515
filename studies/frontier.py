"""The lowest loss at equal training FLOPs over the sizes tried, of models with experts and of dense ones."""

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_blackmamba.report.charts import Chart, Line, Lines
from megatron_blackmamba.report.confidence import half_interval, mean_of
from megatron_blackmamba.study.grids import choosing
from megatron_blackmamba.study.points import Point, unique
from megatron_blackmamba.study.table import Table
from studies.fits import at_best_rates, loss_at
from studies.fresh import WHERE, at_fresh_seeds
from studies.picture import zero

WHOLE_BATCHES = 0.005
"""By how much FLOPs of one budget may differ between models, since a budget is whole batches."""
FEWEST = 3
"""Seeds that measure a difference."""


class Model(NamedTuple):
    """A variant of one size, and its parameters in all."""

    variant: str
    size: str
    parameters: int


@dataclass(frozen=True)
class Against:
    """A size of a variant and the best dense model, at some FLOPs."""

    flops: float
    model: Model
    dense: Model
    values: tuple[float, ...]
    """Loss of the one less that of the other, by seed."""
    is_best: bool
    """Whether no other size of the variant has a lower loss."""
    largest: tuple[bool, bool]
    """Whether each of the two is the largest of its kind, so that a larger one may be better."""


def compared(points: Sequence[Point], first: str) -> Iterator[Against]:
    """Yield each size of a variant with experts and the best dense model, at the FLOPs of each of its budgets.

    The seeds that chose the rates choose the best models too, so that the others do not measure their own choice.
    """
    tuned = at_best_rates(points)
    chose = set().union(*(choosing(points, size) for size in unique(points, "size")))
    curves: dict[Model, dict[int, dict[float, float]]] = {}
    for p in tuned:
        curves.setdefault(_model(p), {}).setdefault(p.seed, {})[p.flops] = p.loss
    experts = {p.variant for p in tuned if p.parameters > p.active}
    own = [p for p in tuned if p.variant == first and first in experts]
    for flops in sorted(unique(own, "flops")) if len(unique(own, "size")) > 1 else ():
        at = {model: _losses_at(by_seed, flops) for model, by_seed in curves.items()}
        at = {model: losses for model, losses in at.items() if len(losses.keys() - chose) >= FEWEST}
        ours = _means((model for model in at if model.variant == first), at, chose)
        dense = _means((model for model in at if model.variant not in experts), at, chose)
        for model in ours if dense else ():
            best = min(dense, key=lambda each: dense[each])
            values = [at[model][seed] - at[best][seed] for seed in sorted(at[model].keys() & at[best].keys() - chose)]
            largest = _is_largest(model, ours), _is_largest(best, dense)
            yield Against(flops, model, best, tuple(values), ours[model] == min(ours.values()), largest)


def table(points: Sequence[Point], first: str) -> Table:
    """Show the differences, and which models they are of."""
    rows = [
        [f"{one.flops:.1e}", _name(one.model, one.largest[0]), _name(one.dense, one.largest[1]), str(len(one.values))]
        + [mean_of(one.values, "+"), "best size" if one.is_best else ""]
        for one in compared(points, first)
    ]
    words = (
        f"Loss of {first} less that of the dense model that has the lowest loss of those with as many FLOPs, of any"
        " size. In brackets, the parameters; the largest model with these FLOPs is marked, since a larger one may be"
        " better. Losses between budgets are interpolated. The seeds that chose rates chose the best models too."
    )
    columns = ("FLOPs", first, "best dense", "seeds", "difference", f"of {first}")
    return Table(f"{first} and the best dense model{WHERE}", words, columns, rows)


def charts(points: Sequence[Point], first: str, names: Mapping[str, str]) -> list[Chart]:
    """Draw the losses of all sizes over FLOPs, and the differences from the best dense one; nothing without them."""
    found = [*compared(points, first)]
    if not found:
        return []
    shown = [p for p in at_fresh_seeds(points) if p.flops < 2 * found[-1].flops]
    all_dense = {_model(p) for p in shown if p.parameters == p.active}
    sizes, dense = (
        sorted(models, key=lambda each: each.parameters) for models in ({each.model for each in found}, all_dense)
    )
    kinds = [names.get(first, first)] * len(sizes) + [names.get(dense[0].variant, dense[0].variant)] * len(dense)
    labels = [
        f"{kind}: {model.parameters / 1e6:.2g}M parameters" for kind, model in zip(kinds, [*sizes, *dense], strict=True)
    ]
    losses = [
        Line(labels[i], *_mean_curve(shown, model), colour=i, dashed=model in sizes)
        for i, model in enumerate([*sizes, *dense])
    ]
    changes = []
    for i, model in enumerate(sizes):
        own = [each for each in found if each.model == model]
        mean = np.array([statistics.fmean(each.values) for each in own])
        half = np.array([half_interval(each.values) or 0.0 for each in own])
        x = [each.flops for each in own]
        changes.append(Line(labels[i], x, mean, mean - half, mean + half, colour=i, dashed=True))
    label, worse = "training FLOPs", zero(changes, "experts are worse above, better below")
    return [
        Lines("Validation loss of every size, in nats", losses, x_label=label, log=True),
        Lines("Loss with experts, less that of the best dense size", [*changes, *worse], x_label=label, log=True),
    ]


def _model(point: Point) -> Model:
    return Model(point.variant, point.size, point.parameters)


def _losses_at(by_seed: Mapping[int, Mapping[float, float]], flops: float) -> dict[int, float]:
    found = {seed: loss_at(curve, flops, WHOLE_BATCHES) for seed, curve in by_seed.items()}
    return {seed: loss for seed, loss in found.items() if loss is not None}


def _means(models: Iterable[Model], at: Mapping[Model, Mapping[int, float]], chose: set[int]) -> dict[Model, float]:
    """Return the mean loss over the choosing seeds, of the models that have any."""
    losses = {model: [loss for seed, loss in at[model].items() if seed in chose] for model in models}
    return {model: statistics.fmean(own) for model, own in losses.items() if own}


def _is_largest(model: Model, others: Collection[Model]) -> bool:
    return len(others) > 1 and model.parameters == max(each.parameters for each in others)


def _name(model: Model, largest: bool) -> str:
    return f"{model.variant}, {model.size} ({model.parameters:,}{', largest' if largest else ''})"


def _mean_curve(points: Sequence[Point], model: Model) -> tuple[list[float], list[float]]:
    """Return FLOPs and the mean loss over the seeds there."""
    losses: dict[float, list[float]] = {}
    for p in points:
        if _model(p) == model:
            losses.setdefault(p.flops, []).append(p.loss)
    return sorted(losses), [statistics.fmean(losses[flops]) for flops in sorted(losses)]
