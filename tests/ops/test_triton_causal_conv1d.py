"""The Triton convolution, interpreted, against the definition in float64: values and every gradient."""

import pytest
import torch

pytest.importorskip("triton")

from megatron_blackmamba.ops.causal_conv1d import Inputs, reference
from tests.ops.interpreted import interpreter

pytestmark = pytest.mark.xdist_group("triton")


@pytest.fixture(scope="module")
def interpreted():
    with interpreter() as run:
        yield run


def problem(batch, length, inner, taps, *, bias=True, window=True, reset=True, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    return {
        "x": normal(batch, length, inner),
        "weight": normal(inner, taps),
        "bias": normal(inner) if bias else None,
        "window": normal(batch, taps - 1, inner) if window else None,
        "reset": torch.rand(batch, length, generator=g) < 0.2 if reset else None,
    }


def results(convolve, inputs, activation, dtype=None):
    names = ("x", "weight", "bias", "window")
    given = [inputs[name] if inputs[name] is None else inputs[name].to(dtype or inputs[name].dtype) for name in names]
    given = [x if x is None else x.detach().clone().requires_grad_() for x in given]
    y = convolve(Inputs(*given[:3], activation, given[3], inputs["reset"]))
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y.backward(dy.to(y.dtype))
    return {"y": y.detach(), **{f"d{n}": x.grad for n, x in zip(names, given, strict=True) if x is not None}}


def triton_results(inputs, activation, tile):
    from megatron_blackmamba.ops.causal_conv1d import triton

    triton.TILE = tile  # short, so that short sequences have seams
    return results(triton.convolve, inputs, activation)


def assert_close(actual, exact, tolerance):
    assert actual.keys() == exact.keys()
    for name in exact:
        error = ((actual[name].double() - exact[name]).abs().max() / exact[name].abs().max()).item()
        assert error < tolerance, f"{name} is off by {error:.1e} of its largest entry"


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize(
    ("shape", "features"),
    [
        ((1, 11, 130, 4), {}),
        ((1, 16, 128, 4), {"window": False, "reset": False}),
        ((1, 17, 5, 3), {"bias": False, "window": False}),
        ((1, 3, 5, 2), {"reset": False}),
        ((2, 2, 3, 5), {}),
    ],
)
def test_values_and_gradients_agree_with_the_definition(interpreted, shape, features, activation):
    inputs = problem(*shape, **features)
    exact = results(reference.convolve, inputs, activation, torch.float64)
    assert_close(interpreted(triton_results, inputs, activation, 8), exact, 2e-6)


def test_sequence_first_layout_is_preserved(interpreted):
    inputs = problem(2, 11, 5, 4)
    exact = results(reference.convolve, inputs, "silu", torch.float64)
    inputs["x"] = inputs["x"].transpose(0, 1).contiguous().transpose(0, 1)
    actual = interpreted(triton_results, inputs, "silu", 8)
    assert_close(actual, exact, 2e-6)
    assert actual["y"].stride() == actual["dx"].stride() == inputs["x"].stride()


def test_bfloat16_is_rounded_once_at_the_end(interpreted):
    inputs = problem(1, 8, 128, 4, dtype=torch.bfloat16)
    exact = results(reference.convolve, inputs, "silu", torch.float64)
    actual = interpreted(triton_results, inputs, "silu", 8)
    one_unit = 2.0**-7 * exact["y"].abs() + 1e-6  # Triton's interpreter truncates where a GPU rounds to nearest
    assert ((actual["y"].double() - exact["y"]).abs() <= one_unit).all()
    assert_close(actual, exact, 8e-3)


def test_unsupported_arguments_are_named(interpreted):
    assert "9" in interpreted(why_not, torch.zeros(1, 5, 4), torch.zeros(4, 9), None)
    assert "float64" in interpreted(why_not, torch.zeros(1, 5, 4, dtype=torch.float64), torch.zeros(4, 4), None)


def why_not(x, weight, window):
    from megatron_blackmamba.ops.causal_conv1d import triton

    return triton.unsupported(Inputs(x, weight, initial_window_BWI=window))
