"""Products in FP8 against float64: of the rounded factors closely, of the exact ones as far as three bits go."""

import pytest
import torch

from megatron_blackmamba.config import load
from megatron_blackmamba.ops import experts, fp8

pytestmark = pytest.mark.skipif(fp8.why_not() is not None, reason=str(fp8.why_not()))
TOKENS, INPUTS, OUTPUTS = 40, 96, 48
COUNTS = [13, 0, 27]


def random(*shape, seed, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def rounded(x):
    """Return in float64 what FP8 keeps of each row, computed number by number."""
    x = x.double()
    scale = x.abs().amax(-1, keepdim=True) / 448
    share = x / scale
    step = 2.0 ** (share.abs().clamp(min=2.0**-6).log2().floor() - 3)  # three bits after the leading one
    return (share / step).round() * step * scale


def distance(a, b):
    return float((a.detach().double() - b).norm() / b.norm())


def linear(x, weight, grad):
    """Return output and gradients of one product, with those of its rounded factors in float64."""
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y = fp8.fp8_linear(*leaves)
    y.backward(grad)
    wanted = [rounded(x) @ rounded(weight).T, rounded(grad) @ rounded(weight.T).T, grad.double().T @ x.double()]
    return [y, *(leaf.grad for leaf in leaves)], wanted


def grouped(x, weight, grad):
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y = experts.grouped_linear(leaves[0], torch.tensor(COUNTS), leaves[1], backend="fp8")
    y.backward(grad)
    parts = [linear(*part)[1] for part in zip(x.split(COUNTS), weight, grad.split(COUNTS), strict=True) if len(part[0])]
    values, inputs, weights = ([part[i] for part in parts] for i in range(3))
    weights.insert(1, torch.zeros(OUTPUTS, INPUTS))
    return [y, *(leaf.grad for leaf in leaves)], [torch.cat(values), torch.cat(inputs), torch.stack(weights)]


@pytest.mark.parametrize("product, shape", [(linear, (OUTPUTS, INPUTS)), (grouped, (3, OUTPUTS, INPUTS))])
def test_values_and_gradients_are_those_of_rounded_factors(product, shape):
    x, weight = random(TOKENS, INPUTS, seed=0), random(*shape, seed=1, scale=0.1)
    rows = torch.logspace(-3, 3, TOKENS)[:, None]  # one scale for all rows would lose the small ones
    found, wanted = product(x * rows.bfloat16(), weight, random(TOKENS, OUTPUTS, seed=2) / rows.bfloat16())
    for a, b in zip(found, wanted, strict=True):
        assert distance(a, b) < 3e-3  # bf16 of the result; a few ties go the other way
    small = [tensor[:4] for tensor in (found[0], wanted[0])]
    assert distance(*small) < 1e-2


def test_batches_of_sequences_keep_their_shape():
    x, weight = random(5, 8, INPUTS, seed=0), random(OUTPUTS, INPUTS, seed=1)
    y = fp8.fp8_linear(x.transpose(0, 1), weight)
    assert torch.equal(y, fp8.fp8_linear(x.transpose(0, 1).reshape(-1, INPUTS), weight).view(8, 5, OUTPUTS))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_show_in_their_row_alone(bad):
    x, weight = random(TOKENS, INPUTS, seed=0), random(OUTPUTS, INPUTS, seed=1)
    x[3, 5] = bad
    finite = fp8.fp8_linear(x, weight).isfinite().all(dim=1)
    assert finite.sum() == TOKENS - 1 and not finite[3]


def test_zero_rows_and_empty_batches_have_gradients():
    weight = random(OUTPUTS, INPUTS, seed=1).requires_grad_()
    x = torch.zeros(4, INPUTS, dtype=torch.bfloat16, requires_grad=True)
    y = fp8.fp8_linear(x, weight)
    y.sum().backward()
    assert not y.any() and not weight.grad.any() and x.grad.isfinite().all()
    nothing = experts.grouped_linear(x[:0], torch.tensor([0, 0]), torch.stack([weight, weight]), backend="fp8")
    nothing.sum().backward()
    assert nothing.shape == (0, OUTPUTS)


@pytest.mark.parametrize(
    "x, weight, named",
    [
        (torch.zeros(4, 32), torch.zeros(16, 32), "Pass both in torch.bfloat16"),
        (torch.zeros(4, 24).bfloat16(), torch.zeros(16, 24).bfloat16(), "multiples of 16"),
        (torch.zeros(4, 16).bfloat16(), torch.zeros(16, 32).bfloat16(), "fp8_linear: x"),
    ],
)
def test_wrong_tensors_are_refused_by_name(x, weight, named):
    with pytest.raises(ValueError, match=named):
        fp8.fp8_linear(x, weight)


@pytest.mark.parametrize(
    "overrides, named",
    [
        (["training.precision=fp32"], "kernels.linear=fp8 rounds bf16 tensors"),
        (["model.hidden_size=72"], "model.hidden_size=72 must be a multiple of 16"),
        (["model.expert_hidden_size=96", "parallel.expert_tensor=4"], "96 / parallel.expert_tensor=4"),
    ],
)
def test_configs_that_fp8_cannot_compute_are_refused(overrides, named):
    with pytest.raises(ValueError, match=named):
        load("tiny", ["training.precision=bf16", "kernels.linear=fp8", *overrides])


def test_dense_models_need_no_size_of_experts():
    assert load("tiny", ["training.precision=bf16", "kernels.linear=fp8", "model.pattern=MMMM"])
