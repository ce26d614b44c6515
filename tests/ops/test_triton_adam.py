"""Adam's Triton kernel, interpreted, against torch's Adam in float64."""

import pytest
import torch

pytest.importorskip("triton")


pytestmark = pytest.mark.xdist_group("triton")
SIZES = [1, 40, 16, 33, 70]
FACTOR = 0.3


def start():
    g = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=g) for size in SIZES]


def gradients(step, dtype=torch.float32):
    g = torch.Generator().manual_seed(step)
    return [torch.randn(size, generator=g).to(dtype) for size in SIZES]


def run_adam(decoupled, shift, moments=None, by_kernel=True, dtype=torch.float32):
    from megatron_blackmamba.engine.adam import Adam
    from megatron_blackmamba.ops.adam import triton as triton_adam

    triton_adam.CHUNK, triton_adam.BLOCK = 32, 16  # whole blocks, a masked end, several chunks
    weights = []
    for weight in start():  # views whose addresses are, or are not, multiples of 16 bytes
        buffer = torch.empty(len(weight) + shift)
        weights.append(torch.nn.Parameter(buffer[shift:].copy_(weight)))
        weights[-1].grad_dtype = None
    adam = Adam(weights, lr=0.1, betas=(0.8, 0.95), weight_decay=0.2, adam_w_mode=decoupled, moments=moments)
    assert adam.fused
    adam.factor = FACTOR
    adam.copies = {weights[1]: torch.zeros(SIZES[1], dtype=torch.bfloat16)}
    adam.fused = by_kernel
    for step in range(3):
        for weight, gradient in zip(weights, gradients(step, dtype), strict=True):
            weight.grad = gradient
        adam.step()
    assert all(table.aligned == (shift == 0) for table in adam._tables.values()) and bool(adam._tables) == by_kernel
    return [w.detach().clone() for w in weights], adam.copies[weights[1]], moments_of(adam, weights)


def moments_of(adam, weights):
    return {name: torch.cat([adam.state[w][name] for w in weights]) for name in ("exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize(("decoupled", "shift"), [(True, 0), (True, 1), (False, 0)])
def test_update_agrees_with_float64(interpreted, decoupled, shift):
    actual, copy, _ = interpreted(run_adam, decoupled, shift)
    exact = [torch.nn.Parameter(weight.double()) for weight in start()]
    updated_in_float64(exact, decoupled)
    for ours, theirs in zip(actual, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs.detach(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(copy.float(), actual[1], rtol=2**-7, atol=0)  # the interpreter cuts digits off


@pytest.mark.parametrize(("shift", "by_kernel"), [(0, True), (1, True), (0, False)])
def test_bf16_gradients_are_read_as_they_are(interpreted, shift, by_kernel):
    actual, _, moments = interpreted(run_adam, True, shift, None, by_kernel, torch.bfloat16)
    exact = [torch.nn.Parameter(weight.double()) for weight in start()]
    references = updated_in_float64(exact, True, torch.bfloat16)
    for ours, theirs in zip(actual, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs.detach(), rtol=2e-6, atol=2e-6)
    for name, reference in references.items():
        torch.testing.assert_close(moments[name].double(), reference, rtol=2e-6, atol=2e-6)


def updated_in_float64(exact, decoupled, dtype=torch.float32):
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = kind(exact, lr=0.1, betas=(0.8, 0.95), weight_decay=0.2)
    for step in range(3):
        for weight, gradient in zip(exact, gradients(step, dtype), strict=True):
            weight.grad = gradient.double() * FACTOR
        reference.step()
    return {name: torch.cat([reference.state[w][name] for w in exact]) for name in ("exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("shift", [0, 1])
def test_bf16_moments_round_as_on_cpus(interpreted, shift):
    actual, _, moments = interpreted(run_adam, True, shift, torch.bfloat16)
    _, _, on_cpus = interpreted(run_adam, True, shift, torch.bfloat16, False)
    exact = [torch.nn.Parameter(weight.double()) for weight in start()]
    references = updated_in_float64(exact, True)
    for name, reference in references.items():
        ours, theirs = moments[name], on_cpus[name]
        assert ours.dtype == theirs.dtype == torch.bfloat16
        assert (ours == theirs).double().mean() > 0.97  # sums in another order may round otherwise
        scale = reference.abs().max()
        torch.testing.assert_close(ours.double(), reference, rtol=3 * 2**-7, atol=0.01 * float(scale))
    for ours, theirs in zip(actual, exact, strict=True):
        assert (ours.double() - theirs).abs().max() < 3 * 0.1 * 0.05  # three updates of at most about 0.1


def run_wrong_gradient():
    from megatron_blackmamba.engine.adam import Adam

    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad_dtype = None
    weight.grad = torch.ones(3, dtype=torch.float16)
    try:
        Adam([weight]).step()
    except ValueError as error:
        return str(error)


def test_gradients_of_another_dtype_are_refused(interpreted):
    assert "float32" in interpreted(run_wrong_gradient)
