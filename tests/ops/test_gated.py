import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megatron_blackmamba.ops.gated import gated
from tests.ops.implementations import CPP, PROPERTY, assert_close, implementation, values_and_gradients


def by_hand(gate_up, weights, activation):
    gate, up = gate_up.chunk(2, dim=-1)
    act = gate * torch.sigmoid(gate) if activation == "silu" else gate * 0.5 * (1 + torch.erf(gate / 2**0.5))
    return act * up * (1.0 if weights is None else weights[:, None])


@pytest.mark.parametrize("name", [*CPP, "reference"])
@PROPERTY
@given(
    tokens=st.sampled_from([0, 1, 16, 37]),
    hidden=st.integers(1, 40),
    scale=st.sampled_from([1.0, 20.0]),
    activation=st.sampled_from(["silu", "gelu"]),
    weighted=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**20),
)
def test_agrees_with_float64_in_values_and_gradients(name, tokens, hidden, scale, activation, weighted, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    gate_up = (torch.randn(tokens, 2 * hidden, generator=g) * scale).to(dtype)
    grad_y = torch.randn(tokens, hidden, generator=g).to(dtype)
    weights = torch.rand(tokens, generator=g) if weighted else None
    exact = lambda x, w: by_hand(x, w, activation)
    exactly = {"gate_up": gate_up.double(), "weights": None if weights is None else weights.double()}
    expected = values_and_gradients(exact, grad_y.double(), **exactly)
    with implementation(name) as backend:
        ours = lambda x, w: gated(x, activation, w, backend=backend)
        actual = values_and_gradients(ours, grad_y, gate_up=gate_up, weights=weights)
    assert actual["y"].dtype == actual["gradient of gate_up"].dtype == dtype
    if tokens:
        of_fp32 = 1e-5 if name == "reference" else 2e-6
        assert_close(actual, expected, tolerance=of_fp32 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("name", CPP)
def test_an_expanded_gradient_and_other_strides_are_taken(name):
    gate_up = torch.randn(40, 9).t().requires_grad_()
    expected = torch.autograd.grad((F.silu(gate_up[:, :20]) * gate_up[:, 20:]).sum(), gate_up)
    with implementation(name):
        torch.testing.assert_close(torch.autograd.grad(gated(gate_up, "silu").sum(), gate_up), expected)
