"""The lowest loss at equal training FLOPs over the sizes tried, of models with experts and of dense ones."""

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from megatron_blackmamba.report.charts import Chart, Line, Lines
from megatron_blackmamba.report.confidence import mean_of
from megatron_blackmamba.study.grids import choosing
from megatron_blackmamba.study.points import Point, unique
from megatron_blackmamba.study.table import Table
from studies.fits import at_best_rates, loss_at
from studies.fresh import WHERE
from studies.picture import banded, mean_curve, zero

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
    edges: tuple[str, str]
    """Whether each of the two is the smallest or largest of its kind there, so that one beyond may be better."""


def compared(points: Sequence[Point], first: str) -> Iterator[Against]:
    """Yield each size of a variant with experts and the best dense model, at the FLOPs of each of its budgets.

    The seeds that chose the rates choose the best models too, so that the others do not measure their own choice.
    Where the largest dense model has no loss, nothing is compared: a smaller one would win for lack of another.
    """
    chose, curves = _chose(points), dict[Model, dict[int, dict[float, float]]]()
    tuned = at_best_rates(points)
    own = [p for p in tuned if p.variant == first and p.parameters > p.active]
    others = [p for p in tuned if p.parameters == p.active]
    for p in [*own, *others]:
        curves.setdefault(_model(p), {}).setdefault(p.seed, {})[p.flops] = p.loss
    largest = max((p.parameters for p in others), default=0)
    for flops in sorted(unique(own, "flops")) if len(unique(own, "size")) > 1 else ():
        at = {model: _losses_at(by_seed, flops) for model, by_seed in curves.items()}
        ours = _means((model for model in at if model.variant == first), at, chose)
        dense = _means((model for model in at if model.variant != first), at, chose)
        for model in ours if any(each.parameters == largest for each in dense) else ():
            best = min(dense, key=lambda each: dense[each])
            fresh = sorted((at[model].keys() & at[best].keys()) - chose)
            values = tuple(at[model][seed] - at[best][seed] for seed in fresh)
            if len(values) >= FEWEST:
                edges = _edge(model, ours), _edge(best, dense)
                yield Against(flops, model, best, values, ours[model] == min(ours.values()), edges)


def table(points: Sequence[Point], first: str) -> Table:
    """Show the differences, and which models they are of."""
    rows = [
        [f"{one.flops:.1e}", _name(one.model, one.edges[0]), _name(one.dense, one.edges[1]), str(len(one.values))]
        + [mean_of(one.values, "+"), "best size" if one.is_best else ""]
        for one in compared(points, first)
    ]
    words = (
        f"Loss of {first} less that of the dense model that has the lowest loss of those with as many FLOPs, of any"
        " size. In brackets, the parameters; the smallest and the largest size with these FLOPs are marked, since one"
        " beyond may be better. Losses between budgets are interpolated. The seeds that chose rates chose the best"
        " models too. The intervals do not allow for the number of rows."
    )
    columns = ("FLOPs", first, "best dense", "seeds", "difference", f"of {first}")
    return Table(f"{first} and the best dense model{WHERE}", words, columns, rows)


def charts(points: Sequence[Point], first: str, names: Mapping[str, str]) -> list[Chart]:
    """Draw the losses of all sizes over FLOPs, and the differences from the best dense one; nothing without them."""
    if not (found := [*compared(points, first)]):
        return []
    chose = _chose(points)
    shown = [p for p in at_best_rates(points) if p.seed not in chose and p.flops < 2 * found[-1].flops]
    alike: dict[str, list[Model]] = {}  # one model may stand for two sizes of the study, with other budgets
    sizes, dense = {each.model for each in found}, {_model(p) for p in shown if p.parameters == p.active}
    for model in (each for models in (sizes, dense) for each in sorted(models, key=attrgetter("parameters"))):
        label = f"{names.get(model.variant, model.variant)}: {model.parameters / 1e6:.2g}M parameters"
        alike.setdefault(label, []).append(model)
    losses, changes = [], []
    for i, (label, models) in enumerate(alike.items()):
        own = [each for each in found if each.model in models]
        curve = mean_curve([p for p in shown if _model(p) in models])
        losses.append(Line(label, *curve, colour=i, dashed=bool(own)))
        x, values = [each.flops for each in own], [each.values for each in own]
        changes.append(banded(label, x, values, colour=i, dashed=True))
    x_label, worse = "training FLOPs", zero(changes, "experts are worse above, better below")
    return [
        Lines("Validation loss of every size, in nats", losses, x_label=x_label, log=True),
        Lines("Loss with experts, less that of the best dense size", [*changes, *worse], x_label=x_label, log=True),
    ]


def _chose(points: Sequence[Point]) -> set[int]:
    return set().union(*(choosing(points, size) for size in unique(points, "size")))


def _model(point: Point) -> Model:
    return Model(point.variant, point.size, point.parameters)


def _losses_at(by_seed: Mapping[int, Mapping[float, float]], flops: float) -> dict[int, float]:
    found = {seed: loss_at(curve, flops, WHOLE_BATCHES) for seed, curve in by_seed.items()}
    return {seed: loss for seed, loss in found.items() if loss is not None}


def _means(models: Iterable[Model], at: Mapping[Model, Mapping[int, float]], chose: set[int]) -> dict[Model, float]:
    """Return the mean loss of the models with enough fresh seeds, over the choosing seeds that all of these have."""
    known = [model for model in models if len(at[model].keys() - chose) >= FEWEST]
    shared = set.intersection(chose, *(set(at[model]) for model in known))
    return {model: statistics.fmean(at[model][seed] for seed in shared) for model in known if shared}


def _edge(model: Model, others: Collection[Model]) -> str:
    sizes = {each.parameters for each in others}
    if len(sizes) == 1:
        return "the only size"
    return {min(sizes): "smallest", max(sizes): "largest"}.get(model.parameters, "")


def _name(model: Model, edge: str) -> str:
    return f"{model.variant}, {model.size} ({model.parameters:,}{edge and f', {edge}'})"
