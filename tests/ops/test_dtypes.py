"""Number formats: every op computes with every floating-point argument it accepts, and refuses the others by name."""

import inspect

import pytest
import torch

from megatron_blackmamba.ops.adam import rounding
from megatron_blackmamba.ops.causal_conv1d import causal_conv1d
from megatron_blackmamba.ops.cross_entropy import cross_entropy
from megatron_blackmamba.ops.experts import grouped_experts, grouped_linear
from megatron_blackmamba.ops.selective_scan import selective_scan
from megatron_blackmamba.ops.sinkhorn import sinkhorn_choice
from tests.ops.calls import OPS, OTHERS, answers, arguments_of

NOT_FLOATS = [torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn]
FLOATS = [torch.float16, torch.bfloat16, torch.float64]
INTEGERS = {"reset_BL", "tokens_E", "tokens_per_expert_E", "ends_E", "labels_T"}
ADDED_TO = {"bias_E"}
EACH = [pytest.param(op, name, id=f"{op.__name__}-{name}") for op, (_, shapes) in OPS.items() for name in shapes]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_every_tensor_argument_is_tried(op):
    annotations = {name: str(p.annotation) for name, p in inspect.signature(op).parameters.items()}
    tensors = {name for name, what in annotations.items() if "Tensor" in what and "Callable" not in what}
    assert tensors - INTEGERS - ADDED_TO == set(OPS[op][1])


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_default_dtype_changes_no_result(op):
    arguments, expected = arguments_of(op), answers(op)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = answers(op, **arguments)
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("op, name", EACH)
def test_complex_numbers_and_integers_are_refused_by_name(op, name):
    spoken = name.rpartition("_")[0] if name.rpartition("_")[2].isupper() else name
    for dtype in NOT_FLOATS:
        with pytest.raises(ValueError, match=f"{op.__name__}: {spoken} is {str(dtype)[6:]}. Pass one of float32"):
            answers(op, **{name: arguments_of(op)[name].to(dtype)})


@pytest.mark.parametrize("op, name", EACH)
def test_mixed_precision_arguments_are_computed_or_refused(op, name):
    for dtype in FLOATS:
        try:
            found = answers(op, **{name: arguments_of(op)[name].to(dtype)})
        except ValueError as error:
            assert op in (grouped_experts, grouped_linear, cross_entropy), error
            continue
        for mine, expected in zip(found, answers(op), strict=True):
            assert torch.allclose(mine.double(), expected.double(), atol=3e-2, rtol=3e-2), (name, dtype)


# Shapes: no op computes with an argument whose sizes do not fit the others; a kernel would read or write beyond it.

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
def test_argument_of_wrong_type_or_dimensions_is_named(op):
    right = tensors_of(op) | OTHERS.get(op, {})
    for name in OPS[op][1]:
        for wrong in (1.5, [1.5], right[name].flatten()[0], right[name][None]):
            with pytest.raises(ValueError, match=f"{op.__name__}: {name.rpartition('_')[0] or name}"):
                op(**right | {name: wrong})


# Stochastic rounding to bf16 keeps the mean, needs no state, and lets no NaN vanish.


def state(count):
    g = torch.Generator().manual_seed(0)
    first, weight = torch.randn(count, generator=g), torch.randn(count, generator=g)
    return first.bfloat16(), (first**2).bfloat16(), weight


def test_rounding_keeps_the_mean_between_neighbours():
    first, second, weight = state(256)
    wide = weight * 1e-3
    below, steps = wide.view(torch.int32) & -0x10000, 2000
    neighbours = below.view(torch.float32), (below + 0x10000).view(torch.float32)
    total = torch.zeros(256, dtype=torch.float64)
    for step in range(steps):
        rounded = rounding.to_bf16(wide, rounding.random_bits(first, second, weight, rounding.seed_of(step))).float()
        assert ((rounded == neighbours[0]) | (rounded == neighbours[1])).all()
        total += rounded
    unit = (neighbours[1] - neighbours[0]).abs()
    error = ((total / steps - wide) / unit).abs()  # of a mean whose standard deviation is at most 0.5 / sqrt(steps)
    assert error.max() < 4.5 * 0.5 * steps**-0.5
    assert error.square().mean().sqrt() < 0.5 * steps**-0.5


def test_bits_are_uniform_and_independent():
    first, second, weight = state(2**16)
    draws = [rounding.random_bits(first, second, weight, rounding.seed_of(step)) for step in (1, 2)]
    lower, upper = (part.double() for part in (draws[0] & 0xFFFF, draws[0] >> 16 & 0xFFFF))
    later = (draws[1] & 0xFFFF).double()
    for part in (lower, upper, later):
        counts = torch.histc(part, 64, 0, 2**16)
        assert ((counts - 1024).square() / 1024).sum() < 120  # chi-squared of 63 degrees of freedom: once in 100,000
    for other in (upper, later):
        assert torch.corrcoef(torch.stack([lower, other]))[0, 1].abs() < 0.02


def test_what_bf16_holds_is_kept():
    held = torch.tensor([0.0, -0.0, 1.0, -3.5, float("inf"), float("-inf"), 2.0**-133])
    for bits in (0, 0xFFFF, -1):
        kept = rounding.to_bf16(held, torch.full((7,), bits, dtype=torch.int32))
        assert torch.equal(kept.float().view(torch.int32), held.view(torch.int32))


def test_nan_stays_nan():
    nan = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    assert rounding.to_bf16(nan, torch.full((3,), 0xFFFF, dtype=torch.int32)).isnan().all()
