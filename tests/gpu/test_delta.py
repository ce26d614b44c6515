"""The delta rule on a GPU against the definition in float64, PyTorch and Triton."""

import pytest
import torch

from megatron_blackmamba.ops.delta import available_backends, delta

pytestmark = pytest.mark.gpu


def problem(by_channel, dtype, length=333, batch=2, heads=4, keys=128, values=128):
    """Return keys of length 1 with gates from 0 to 2, decays of very different size, and documents."""
    g = torch.Generator("cuda").manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=g, device="cuda")
    D = keys if by_channel else 1
    q, k = (torch.nn.functional.normalize(normal(batch, length, heads, keys), dim=-1) for _ in range(2))
    gate = 2 * torch.rand(batch, length, heads, D, generator=g, device="cuda")
    decay = -torch.exp(2 * normal(batch, length, heads, D) - 3)
    tokens = [x.to(dtype) for x in (q, k, gate * k, normal(batch, length, heads, values), decay)]
    reset = torch.rand(batch, length, generator=g, device="cuda") < 0.01
    return [*tokens, normal(batch, heads, keys, values)], reset


def results(tensors, reset, backend, dtype=None):
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]
    *tokens, start = leaves
    y, end = delta(*tokens, initial_state_BHKV=start, reset_BL=reset, backend=backend)
    torch.autograd.backward((y, end), (torch.ones_like(y), torch.ones_like(end)))
    names = ("q", "k", "erase", "written", "log_decay", "start")
    return {"y": y.detach(), "end": end.detach()} | {f"d{name}": x.grad for name, x in zip(names, leaves, strict=True)}


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_agrees_with_the_definition_in_value_and_gradient(backend, dtype, tolerance, by_channel):
    if why_not := available_backends()[backend]:
        pytest.skip(why_not)
    inputs = problem(by_channel, dtype)
    exact = results(*inputs, "reference", torch.float64)
    for name, actual in results(*inputs, backend).items():
        error = (actual.double() - exact[name]).norm() / exact[name].norm()
        assert error < tolerance, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("by_channel", [False, True])
def test_gradients_in_triton_are_bitwise_reproducible(by_channel):
    inputs = problem(by_channel, torch.float32)
    first, second = (results(*inputs, "triton") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
