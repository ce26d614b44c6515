"""The compiled convolution on a GPU, against the definition in float64 and causal-conv1d."""

import pytest
import torch

from megatron_blackmamba.ops.causal_conv1d import Inputs, causal_conv1d, reference

pytestmark = pytest.mark.gpu


def problem(batch, length, inner, taps=4, dtype=torch.float32, reset=True):
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g, device="cuda").to(dtype)

    resets = torch.rand(batch, length, generator=g, device="cuda") < 0.05 if reset else None
    return normal(batch, length, 2 * inner)[..., :inner], normal(inner, taps), normal(inner), resets


def results(x, weight, bias, reset, dtype=None, backend="triton"):
    given = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (x, weight, bias)]
    y = causal_conv1d(*given, reset_BL=reset, backend=backend)
    dy = torch.randn(y.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    y.backward(dy.to(x.dtype).to(y.dtype))  # rounded for the reference too
    return [y.detach(), *(t.grad for t in given)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("shape", [(2, 2048, 2304), (1, 333, 200), (3, 5, 7, 3)], ids=str)
def test_agrees_with_the_definition_in_value_and_gradient(shape, dtype, tolerance):
    inputs = problem(*shape, dtype=dtype)
    exact = results(*inputs, dtype=torch.float64, backend="reference")
    for actual, right in zip(results(*inputs), exact, strict=True):
        assert (actual.double() - right).norm() < tolerance * right.norm()


def test_gradients_repeat_bit_by_bit():
    inputs = problem(4, 2048, 2304, dtype=torch.bfloat16)
    for once, again in zip(results(*inputs), results(*inputs), strict=True):
        assert torch.equal(once, again)


def test_agrees_with_causal_conv1d_where_that_is_installed():
    peer = pytest.importorskip("causal_conv1d")
    x, weight, bias, _ = problem(2, 1024, 2304, dtype=torch.bfloat16, reset=False)
    theirs = peer.causal_conv1d_fn(x.transpose(1, 2).contiguous(), weight, bias, activation="silu").transpose(1, 2)
    ours = causal_conv1d(x, weight, bias, backend="triton")
    assert (ours.float() - theirs.float()).norm() < 5e-3 * theirs.float().norm()
    assert reference.convolve(Inputs(x, weight, bias)).shape == ours.shape
