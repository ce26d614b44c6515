import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_blackmamba.ops.rms_norm import rms_norm
from tests.ops.implementations import CPP, PROPERTY, assert_close, implementation, values_and_gradients

EPS = 1e-5


def by_hand(x, weight):
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize("name", [*CPP, "reference"])
@PROPERTY
@given(
    tokens=st.sampled_from([1, 3, 64, 65, 200]),
    D=st.integers(1, 70),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**20),
)
def test_agrees_with_float64_in_values_and_gradients(name, tokens, D, scale, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    x, grad_y = torch.randn(tokens, D, generator=g) * scale, torch.randn(tokens, D, generator=g).to(dtype)
    weight = torch.randn(D, generator=g).to(dtype)
    expected = values_and_gradients(by_hand, grad_y.double(), x=x.double(), weight=weight.double())
    with implementation(name) as backend:
        actual = values_and_gradients(lambda x, w: rms_norm(x, w, EPS, backend=backend), grad_y, x=x, weight=weight)
    assert actual["y"].dtype == actual["gradient of weight"].dtype == dtype
    tolerance, name = 2e-6 if dtype == torch.float32 else 1e-2, "gradient of x"
    # Its terms are larger than their sum, by any factor where D is 1.
    terms = (grad_y.double() * weight.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()).abs().max()
    assert_close({name: actual.pop(name)}, {name: expected.pop(name)}, tolerance * max(1.0, float(terms)))
    assert_close(actual, expected, tolerance)


@pytest.mark.parametrize("name", CPP)
def test_threads_change_no_bit_and_strides_no_value(name, monkeypatch):
    x, weight, grad_y = torch.randn(5, 90, 48), torch.randn(48), torch.randn(5, 90, 48)
    norm = lambda x, w: rms_norm(x, w, EPS)
    with implementation(name):
        one = values_and_gradients(norm, grad_y, x=x, weight=weight)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
        three = values_and_gradients(norm, grad_y, x=x, weight=weight)
        strided = values_and_gradients(norm, grad_y.transpose(0, 1), x=x.transpose(0, 1), weight=weight)
    for key, value in one.items():
        assert torch.equal(value, three[key]), key
    torch.testing.assert_close(strided["gradient of x"].transpose(0, 1), one["gradient of x"])


def test_what_cpp_cannot_do_goes_to_pytorch():
    x, weight = torch.randn(3, 8), torch.randn(8)
    torch.testing.assert_close(rms_norm(x.bfloat16(), weight, EPS), by_hand(x.bfloat16().float(), weight))
