"""The gated norm in Triton on a GPU against PyTorch's operations in float64."""

import pytest
import torch

from megatron_blackmamba.ops.gated_norm import available_backends, gated_rms_norm

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def triton():
    if why_not := available_backends()["triton"]:
        pytest.skip(why_not)


def problem(dtype, channels):
    """Return x and a gradient of Megatron's layout, with gates in rows of in_proj, and weights."""
    g = torch.Generator("cuda").manual_seed(0)
    x, gate, grad = (
        torch.randn(333, 3, width, generator=g, device="cuda").to(dtype).transpose(0, 1)
        for width in (channels, 2 * channels + 292, channels)
    )
    weight = 1 + torch.randn(channels, generator=g, device="cuda").to(dtype)
    return {"x": x, "gate": gate, "weight": weight}, grad


def results(inputs, grad, groups, norm_first, backend, dtype=None):
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in inputs.items()}
    x, gate, weight = leaves.values()
    y = gated_rms_norm(
        x, gate[..., : x.shape[-1]], weight, groups, 1e-5, norm_first=norm_first, backend=backend
    )  # fmt: skip
    y.backward(grad.to(y.dtype))
    return {"y": y.detach()} | {f"d{name}": leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize(("channels", "groups"), [(2304, 1), (2304, 36), (50, 2), (5120, 1)])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_agrees_with_float64_in_value_and_gradient(dtype, norm_first, channels, groups):
    inputs, grad = problem(dtype, channels)
    exact = results(inputs, grad, groups, norm_first, "reference", torch.float64)
    for name, actual in results(inputs, grad, groups, norm_first, "triton").items():
        error = (actual.double() - exact[name]).norm() / exact[name].norm()
        assert error < TOLERANCE[dtype], f"{name} is off by {error:.1e}"


def test_gradients_are_bitwise_reproducible():
    inputs, grad = problem(torch.bfloat16, 2304)
    first, second = (results(inputs, grad, 1, False, "triton") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
