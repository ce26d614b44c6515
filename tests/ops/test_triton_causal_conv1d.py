"""The Triton convolution, interpreted, against the definition in float64: values and every gradient."""

import pytest
import torch

pytest.importorskip("triton")

from megatron_blackmamba.ops.causal_conv1d import Inputs, reference
from tests.ops.test_triton_selective_scan import assert_close

pytestmark = pytest.mark.xdist_group("triton")


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
    from megatron_blackmamba.ops import backends
    from megatron_blackmamba.ops.causal_conv1d import triton

    return backends.unsupported(triton, Inputs(x, weight, initial_window_BWI=window))


def rows_of(function, inputs, grads, dtype):
    leaves = [inputs[name].detach().clone().to(dtype).requires_grad_() for name in ("x", "weight", "bias")]
    outputs = function(leaves[0], leaves[1], leaves[2], inputs["reset"])
    torch.autograd.backward(outputs, [grad.to(dtype) for grad in grads[: len(outputs)]])
    return {"y": outputs[0].detach(), **{f"d{n}": x.grad for n, x in zip("xwb", leaves, strict=True)}}


def triton_rows(inputs, grads, dtype, readers):
    from megatron_blackmamba.ops.causal_conv1d import triton
    from megatron_blackmamba.ops.causal_conv1d.halves import convolve_first_half

    triton.TILE = 8

    def convolve(x, weight, bias, reset):
        found = convolve_first_half(x, weight, bias, reset_BL=reset)
        assert found.gradient is not None
        return [found.x_BLI, found.x_again_BLI, found.z_BLI][:readers]

    return rows_of(convolve, inputs, grads, dtype)


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_gradients_of_both_readers_are_added(interpreted, readers):
    inputs = problem(2, 11, 12, 4, window=False) | {"reset": None}
    inputs |= {"weight": inputs["weight"][:6], "bias": inputs["bias"][:6]}
    g = torch.Generator().manual_seed(2)
    grads = [torch.randn(2, 11, 6, generator=g, dtype=torch.float64) for _ in range(3)]

    def exact(x, weight, bias, reset):
        y = reference.convolve(Inputs(x[..., :6], weight, bias, "silu", None, reset))
        return [y, y * 1, x[..., 6:] * 1][:readers]

    expected = rows_of(exact, inputs, grads, torch.float64)
    assert_close(interpreted(triton_rows, inputs, grads, torch.float32, readers), expected, 2e-6)


def mamba_rows(xz, weight, bias, delta, B, C, A, dy):
    """Return the gradient of rows that a convolution and a scan read, and whether it was written in place."""
    from megatron_blackmamba.ops.causal_conv1d.halves import convolve_first_half
    from megatron_blackmamba.ops.library import empty_like_rows
    from megatron_blackmamba.ops.selective_scan import selective_scan

    copies = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "megatron_blackmamba.ops.causal_conv1d.halves.empty_like_rows",
            lambda x, **more: copies.append(1) or empty_like_rows(x, **more),
        )
        grads = []
        for backend in ("triton", "reference"):
            leaf = xz.clone().to(torch.float64 if backend == "reference" else xz.dtype).requires_grad_()
            others = [x.to(leaf.dtype) for x in (weight, bias, delta, A, B, C)]
            found = convolve_first_half(leaf.transpose(0, 1), others[0], others[1], backend=backend)
            how = {} if found.gradient is None else {"z_gradient": found.gradient.of_second_half}
            y = selective_scan(found.x_again_BLI, *others[2:], z_BLI=found.z_BLI, backend=backend, **how)
            (y + found.x_BLI).backward(dy.to(leaf.dtype))
            grads.append(leaf.grad)
    return *grads, len(copies)


def test_scan_writes_its_half_of_gradient_in_place(interpreted):
    g = torch.Generator().manual_seed(3)
    xz, weight, bias = (torch.randn(*shape, generator=g) for shape in ((9, 2, 16), (8, 4), (8,)))
    delta, B, C, dy = (torch.randn(2, 9, n, generator=g) for n in (8, 4, 4, 8))
    A = -torch.rand(8, 4, generator=g)
    actual, exact, allocated = interpreted(mamba_rows, xz, weight, bias, delta, B, C, A, dy)
    assert_close({"dxz": actual}, {"dxz": exact}, 2e-6)
    assert allocated == 1  # by the scan, and by nobody to copy it
