import pytest
import torch
import torch.nn.functional as F

from megatron_blackmamba.ops.fp32_linear import Fp32Product, applies, fp32_linear
from tests.ops.implementations import assert_close, values_and_gradients


def inputs():
    g = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=g).bfloat16() for shape in ((60, 48), (8, 48), (60, 8))]


def test_product_of_bf16_agrees_with_float64():
    x, weight, grad = inputs()
    product = lambda x, weight: Fp32Product.apply(x, weight)[0]
    actual = values_and_gradients(product, grad, x=x, weight=weight)
    exact = values_and_gradients(F.linear, grad, x=x.double(), weight=weight.double())
    assert actual["y"].dtype == torch.float32
    assert_close({"y": actual["y"]}, {"y": exact["y"]}, 1e-6)
    assert_close(actual, exact, 1e-2)


@pytest.mark.parametrize("read", ["both", "input"])
def test_gradients_of_other_readers_are_added(read):
    x, weight, grad = inputs()
    beside = torch.randn(60, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    y, same = Fp32Product.apply(*leaves)
    outputs = [(same, beside), (y, grad.float())] if read == "both" else [(same, beside)]
    torch.autograd.backward(*map(list, zip(*outputs, strict=True)))
    if read == "input":
        assert torch.equal(leaves[0].grad, beside) and leaves[1].grad is None
        return
    exact = [t.double().requires_grad_() for t in (x, weight)]
    ((F.linear(*exact) * grad.double()).sum() + (exact[0] * beside.double()).sum()).backward()
    assert_close(*({"x": a.grad, "weight": b.grad} for a, b in (leaves, exact)), 1e-2)


def test_cpus_round_nothing_and_keep_float64():
    x, weight, _ = inputs()
    assert not applies(x, weight)
    assert fp32_linear(x, weight, weight[:, 0]).dtype == torch.float32
    assert fp32_linear(x.double(), weight.double(), weight[:, 0].double(), torch.float64).dtype == torch.float64
