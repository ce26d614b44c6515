"""Products in FP8 on a GPU, against the rounded factors in float64."""

import pytest
import torch

from megatron_blackmamba.ops import experts, fp8

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(fp8.why_not() is not None, reason=str(fp8.why_not()))]
COUNTS = [700, 0, 333, 15]


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rounded(x):
    """Return what FP8 keeps of each row, in float64."""
    numbers, scale = fp8.by_rows(x)
    return numbers.double() * scale.double()[..., None]


def exact(x, weight, grad):
    """Return output and gradients of one product, from rounded factors; that of the weight is not in FP8."""
    return rounded(x) @ rounded(weight).T, rounded(grad) @ rounded(weight.T).T, grad.double().T @ x.double()


def exact_groups(x, weight, grad):
    parts = [exact(*part) for part in zip(x.split(COUNTS), weight, grad.split(COUNTS), strict=True)]
    values, inputs, weights = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(inputs), torch.stack(weights)


def grouped(x, weight):
    return experts.grouped_linear(x, torch.tensor(COUNTS, device=x.device), weight, backend="fp8")


@pytest.mark.parametrize(
    "product, shape, definition", [(fp8.fp8_linear, (4608, 1152), exact), (grouped, (4, 6144, 1152), exact_groups)]
)
def test_agrees_with_the_rounded_factors_in_float64(product, shape, definition):
    rows = torch.logspace(-3, 3, sum(COUNTS))[:, None].bfloat16()  # one scale for all rows would lose the small ones
    x, weight = random(sum(COUNTS), shape[-1], seed=0) * rows, random(*shape, seed=1)
    grad = random(sum(COUNTS), shape[-2], seed=2) / rows
    leaves = [t.cuda().requires_grad_() for t in (x, weight)]
    y = product(*leaves)
    y.backward(grad.cuda())
    for found, wanted in zip((y, *(leaf.grad for leaf in leaves)), definition(x, weight, grad), strict=True):
        assert (found.detach().cpu().double() - wanted).norm() < 1e-2 * wanted.norm()


def test_rows_are_rounded_as_on_the_cpu():
    weight = random(3, 96, 200, seed=0)
    for x in (weight, weight.mT):
        numbers, scale = fp8.by_rows(x.cuda())
        wanted, wanted_scale = fp8.by_rows(x)
        assert torch.equal(scale.cpu(), wanted_scale)
        assert (numbers.cpu().float() == wanted.float()).float().mean() > 0.999
