"""Width transfer (µP): initial values and learning rates of a model from those of its base model (docs/width.md).

A matrix whose inputs are `growth` times as many as in the base model has a learning rate that is as many times smaller.
Its initial deviation falls with the root, and that of rows whose number does not grow (readouts) with the growth
itself. All other parameters stay as they are.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_blackmamba import layers, optimizers
from megatron_blackmamba.settings import ModelConfig, RunConfig

if TYPE_CHECKING:
    from torch import Tensor

MTP_PROJECTION = f"{layers.MTP}.proj.weight"
"""The only matrix in no layer."""


def growth(parameter: str, model: ModelConfig) -> float:
    """Return how many times as many inputs a matrix has as in the base model; 1 for all other parameters.

    parameter: Its global name, or the stack of which it is a part.
    """
    if model.mup.base_width is None:
        return 1.0
    mixer = layers.mixer_of(parameter, model)
    if mixer is None:
        return model.hidden_size / model.base_width if parameter == MTP_PROJECTION else 1.0
    kind, name = mixer
    shape, before = (_shapes(kind, each).get(name, ()) for each in (model, model.base))
    return shape[-1] / before[-1] if len(shape) > 1 else 1.0


def scale_initial(weight: "Tensor", parameter: str, model: ModelConfig) -> "Tensor":
    """Return the normal initial values of a parameter, scaled in place from the base model's deviation."""
    grown = growth(parameter, model)
    if grown == 1:
        return weight
    weight *= grown**-0.5
    if mixer := layers.mixer_of(parameter, model):
        kind, name = mixer
        for rows in readouts(kind, model).get(name, ()):
            weight[rows] *= grown**-0.5
    return weight


def update_scales(parameter: str, model: ModelConfig) -> list[float]:
    """Return the factor of an orthogonal update for each part of a weight.

    Its largest singular value is as √(larger side). A stable change of what the part computes needs √(rows / columns).
    """
    if model.mup.base_width is None:
        return [1.0]
    if layers.mixer_of(parameter, model) is None:
        return [growth(parameter, model) ** -0.5]
    now, before = (_of_one(layers.weight_of(parameter, each)) for each in (model, model.base))
    return [_share(now, part) / _share(before, part) for part in now.rows]


def _of_one(declared: layers.Weight | layers.Stack | None) -> layers.Weight:
    assert declared is not None
    return declared.weight if isinstance(declared, layers.Stack) else declared


def _share(weight: layers.Weight, part: str) -> float:
    """Return the singular values that a part needs over those that its updates have."""
    rows, columns = weight.count(part), weight.columns[-1]
    return (rows / columns / max(rows, columns)) ** 0.5


def readouts(kind: layers.LayerKind, model: ModelConfig) -> dict[str, list[slice]]:
    """Return the rows whose number is the same in the base model, by the weight's name in the mixer."""
    before = kind.weights(model.base)
    return {
        name: [rows for part, rows in weight.places() if weight.count(part) == before[name].count(part)]
        for name, weight in kind.weights(model).items()
    }


def problems(run: RunConfig) -> Iterator[str]:
    """Refuse a width transfer of kinds for which no rule is derived."""
    if run.model.mup.base_width is None:
        return
    for kind in layers.kinds_in(run.model.pattern):
        if not kind.widens:
            yield (
                f"model.mup: {kind.name} layers ({kind.letter}) have no rule for growing widths. Leave"
                " model.mup.base_width out, or set `widens` of the kind (docs/extending.md)."
            )
    if not optimizers.kind_of(run.optimizer.kind).widens:
        able = " or ".join(kind.name for kind in optimizers.all_kinds() if kind.widens)
        yield f"model.mup: optimizer.kind={run.optimizer.kind} has no rule for growing widths. Use {able}."
    if run.optimizer.matrices == "whole":
        yield "model.mup: the parts of a weight have updates of unequal size. Use optimizer.matrices=parts."


def _shapes(kind: layers.LayerKind, model: ModelConfig) -> dict[str, tuple[int, ...]]:
    return kind.shapes(model) | {name: stack.shape for name, stack in kind.stacks(model).items()}
