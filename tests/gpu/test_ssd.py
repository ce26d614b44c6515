"""The scans of Mamba-2 and Mamba-3 on a GPU in float64, PyTorch and Triton, and mamba-ssm where installed."""

import pytest
import torch

from megatron_blackmamba.ops.mamba3 import Rates, mamba3
from megatron_blackmamba.ops.ssd import available_backends, ssd

pytestmark = pytest.mark.gpu
PER_TOKEN = ("x", "dt", "B", "C")


def problem(length=512, dtype=torch.bfloat16, batch=2, heads=36, channels=64, groups=2, state=128):
    g = torch.Generator("cuda").manual_seed(0)
    shapes = {"x": (batch, length, heads, channels), "dt": (batch, length, heads), "A": (heads,)}
    shapes |= dict.fromkeys(("B", "C"), (batch, length, groups, state))
    shapes |= {"D": (heads,), "bias": (heads,), "start": (batch, heads, channels, state)}
    tensors = {name: torch.randn(*shape, generator=g, device="cuda") for name, shape in shapes.items()}
    tensors |= {name: tensors[name].to(dtype) for name in PER_TOKEN}
    tensors |= {"A": -torch.exp(tensors["A"]), "bias": tensors["bias"] - 3}
    return tensors, torch.rand(batch, length, generator=g, device="cuda") < 0.01


def results(tensors, reset, backend, dtype=None):
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in tensors.items()}
    *given, bias, start = leaves.values()
    options = {"dt_bias_H": bias, "initial_state_BHPN": start, "reset_BL": reset, "return_final_state": True}
    y, end = ssd(*given, **options, backend=backend)
    torch.autograd.backward((y, end), (torch.ones_like(y), torch.ones_like(end)))
    return {"y": y.detach(), "end": end.detach()} | {f"d{name}": leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("backend", ["chunked", "triton", "mamba_ssm"])
@pytest.mark.parametrize("length", [512, 333])
def test_agrees_with_the_definition_in_value_and_gradient(backend, length, dtype, tolerance):
    if why_not := available_backends()[backend]:
        pytest.skip(why_not)
    inputs = problem(length, dtype)
    exact = results(*inputs, "reference", torch.float64)
    for name, actual in results(*inputs, backend).items():
        error = (actual.double() - exact[name]).norm() / exact[name].norm()
        assert error < tolerance, f"{name} is off by {error:.1e}"


def test_gradients_in_triton_are_bitwise_reproducible():
    inputs = problem()
    first, second = (results(*inputs, "triton") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def results_of_mamba3(tensors, reset, backend, dtype=None):
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in tensors.items()}
    rates = Rates.of(*(leaves[name] for name in ("dt", "A", "trap", "angle", "bias")), 0.1)
    given = (leaves[name] for name in ("B", "C", "B_bias", "C_bias", "D"))
    y, _ = mamba3(leaves["x"], rates, *given, reset_BL=reset, backend=backend)
    y.sum().backward()
    return {"y": y.detach()} | {f"d{name}": leaf.grad for name, leaf in leaves.items()}


def problem_of_mamba3(dtype, device="cuda", batch=2, length=333, heads=8, channels=64, groups=2, state=128):
    g = torch.Generator(device).manual_seed(0)
    shapes = {"x": (batch, length, heads, channels), "angle": (batch, length, state // 4), "bias": (heads,)}
    shapes |= dict.fromkeys(("dt", "A", "trap"), (batch, length, heads)) | {"D": (heads,)}
    shapes |= dict.fromkeys(("B", "C"), (batch, length, 1, groups, state))
    shapes |= dict.fromkeys(("B_bias", "C_bias"), (heads, 1, state))
    tensors = {name: torch.randn(*shape, generator=g, device=device) for name, shape in shapes.items()}
    narrow = ("x", "B", "C", "dt", "A", "trap", "angle")
    tensors |= {name: tensors[name].to(dtype) for name in narrow} | {"bias": tensors["bias"] - 3}
    return tensors, torch.rand(batch, length, generator=g, device=device) < 0.01


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
def test_mamba3_agrees_with_float64_in_value_and_gradient(dtype, tolerance):
    if why_not := available_backends()["triton"]:
        pytest.skip(why_not)
    inputs = problem_of_mamba3(dtype)
    exact = results_of_mamba3(*inputs, "chunked", torch.float64)
    for name, actual in results_of_mamba3(*inputs, "auto").items():
        error = (actual.double() - exact[name]).norm() / exact[name].norm()
        assert error < tolerance, f"{name} is off by {error:.1e}"
