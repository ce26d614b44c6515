"""Products in FP8 on a GPU, against the same on the CPU, which tests/ops/test_fp8.py compares with float64."""

import pytest
import torch

from megatron_blackmamba.ops import experts, fp8

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(fp8.why_not() is not None, reason=str(fp8.why_not()))]
COUNTS = [700, 0, 333, 15]


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def values_and_gradients(product, x, weight, grad, device):
    leaves = [t.to(device).requires_grad_() for t in (x, weight)]
    y = product(*leaves)
    y.backward(grad.to(device))
    return [t.detach().cpu().double() for t in (y, *(leaf.grad for leaf in leaves))]


def grouped(x, weight):
    return experts.grouped_linear(x, torch.tensor(COUNTS, device=x.device), weight, backend="fp8")


@pytest.mark.parametrize("product, shape", [(fp8.fp8_linear, (4608, 1152)), (grouped, (4, 6144, 1152))])
def test_agrees_with_the_cpu(product, shape):
    rows = torch.logspace(-3, 3, sum(COUNTS))[:, None].bfloat16()
    x, weight = random(sum(COUNTS), shape[-1], seed=0) * rows, random(*shape, seed=1)
    grad = random(sum(COUNTS), shape[-2], seed=2) / rows
    there, here = (values_and_gradients(product, x, weight, grad, device) for device in ("cuda", "cpu"))
    for a, b in zip(there, here, strict=True):
        assert (a - b).norm() < 1e-2 * b.norm()


def test_rows_are_rounded_as_on_the_cpu():
    weight = random(3, 96, 200, seed=0)
    for x in (weight, weight.mT):
        numbers, scale = fp8.by_rows(x.cuda())
        wanted, wanted_scale = fp8.by_rows(x)
        assert torch.equal(scale.cpu(), wanted_scale)
        assert (numbers.cpu().float() == wanted.float()).float().mean() > 0.999  # the division may round otherwise
