"""Shapes: no op computes with an argument whose sizes do not fit the others; a kernel would read or write beyond it."""

import pytest
import torch

from megatron_blackmamba.ops.causal_conv1d import causal_conv1d
from megatron_blackmamba.ops.experts import grouped_experts
from megatron_blackmamba.ops.selective_scan import selective_scan
from megatron_blackmamba.ops.sinkhorn import sinkhorn_choice
from tests.ops.calls import OPS, OTHERS, answers, arguments_of

SIZES = {"x": "TD", "initial_window": "BKI"}
"""Letters of arguments whose names do not say them."""
SAME = str.maketrans("GW", "FK")  # G = 2F, W = K - 1


def letters(op, name):
    known = SIZES if name in SIZES and not name[-1].isupper() else {}
    return known.get(name, name.rpartition("_")[2]).translate(SAME)


def tensors_of(op):
    more = {"tokens_E": torch.zeros(2, dtype=torch.int64)} if op is sinkhorn_choice else OTHERS.get(op, {})
    return arguments_of(op) | {name: value for name, value in more.items() if isinstance(value, torch.Tensor)}


def cases():
    """Every size of every argument that another argument of the op must share."""
    for op in OPS:
        names = list(tensors_of(op))
        for name in names:
            others = "".join(letters(op, other) for other in names if other != name)
            for dimension, letter in enumerate(letters(op, name)):
                if letter in others:
                    yield pytest.param(op, name, dimension, id=f"{op.__name__}-{name}-{dimension}")


def resized(tensor, dimension, by):
    indices = torch.arange(tensor.shape[dimension] + by) % tensor.shape[dimension]
    return tensor.index_select(dimension, indices)


@pytest.mark.parametrize("op, name, dimension", cases())
def test_argument_of_another_size_is_refused(op, name, dimension):
    for by in (1, -1):
        with pytest.raises(ValueError, match=r"shape|channel|columns|add up"):
            answers(op, **tensors_of(op) | {name: resized(tensors_of(op)[name], dimension, by)})


PUBLIC = (selective_scan, causal_conv1d, sinkhorn_choice, grouped_experts)


@pytest.mark.parametrize("op", PUBLIC, ids=lambda op: op.__name__)
def test_argument_that_is_no_tensor_or_has_other_dimensions_is_named(op):
    right = tensors_of(op) | OTHERS.get(op, {})
    for name in OPS[op][1]:
        for wrong in (1.5, [1.5], right[name].flatten()[0], right[name][None]):
            with pytest.raises(ValueError, match=f"{op.__name__}: {name.rpartition('_')[0] or name}"):
                op(**right | {name: wrong})
