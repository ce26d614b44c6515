"""The fused Triton kernels of a training step, interpreted, against the definitions in float64."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from tests.ops.implementations import assert_close
from tests.ops.interpreted import last_program_first

pytestmark = pytest.mark.xdist_group("triton")
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


def random(*shape, seed, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def leaves_of(tensors, dtype=None):
    return [None if x is None else x.detach().clone().to(dtype or x.dtype).requires_grad_() for x in tensors]


def named(outputs, leaves):
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return found | {f"gradient {i}": x.grad for i, x in enumerate(leaves) if x is not None}


def run_gated(gate_up, weights, grad, gelu):
    from megatron_blackmamba.ops.gated import gated

    leaves = leaves_of([gate_up, weights])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_blackmamba.ops.gated.triton.BLOCK_F", 16)  # several blocks
        last_program_first(patch)
        y = gated(leaves[0], "gelu" if gelu else "silu", leaves[1])
        y.backward(grad)
    return named([y], leaves)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("gelu", "weighted"), [(False, True), (True, True), (False, False)])
def test_gating_agrees_with_float64(interpreted, dtype, gelu, weighted):
    gate_up, grad = random(5, 2 * 37, seed=0, dtype=dtype, scale=3.0), random(5, 37, seed=1, dtype=dtype)
    weights = random(5, seed=2).sigmoid() if weighted else None
    actual = interpreted(run_gated, gate_up, weights, grad, gelu)
    exact = leaves_of([gate_up, weights], torch.float64)
    gate, up = exact[0].chunk(2, dim=-1)
    y = (F.gelu(gate) if gelu else F.silu(gate)) * up * (1.0 if exact[1] is None else exact[1][:, None])
    y.backward(grad.double())
    assert_close(actual, named([y], exact), TOLERANCE[dtype])


def run_norm(x, branch, weight, grad_y, grad_stream):
    from megatron_blackmamba.ops.rms_norm import norm_and_stream
    from megatron_blackmamba.ops.rms_norm import triton as triton_norm

    triton_norm.programs = lambda x: 3  # several tokens each
    leaves = leaves_of([x, branch, weight])
    y, stream = norm_and_stream(leaves[0], leaves[2], 1e-5, leaves[1])
    outputs = [(y, grad_y)] + ([(stream, grad_stream)] if grad_stream is not None else [])
    torch.autograd.backward(*map(list, zip(*outputs, strict=True)))
    return named([y, stream], leaves)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("beside", "branched"), [(True, False), (False, False), (True, True), (False, True)])
def test_norm_adds_the_branch_and_stream_gradients(interpreted, dtype, beside, branched):
    x, weight = random(7, 2, 50, seed=0), 1 + random(50, seed=1, dtype=dtype)
    branch = random(7, 2, 50, seed=4, dtype=dtype) if branched else None
    grad_y, grad_stream = random(7, 2, 50, seed=2, dtype=dtype), random(7, 2, 50, seed=3) if beside else None
    actual = interpreted(run_norm, x, branch, weight, grad_y, grad_stream)
    exact = leaves_of([x, branch, weight], torch.float64)
    stream = exact[0] + (exact[1] if branched else 0.0)
    y = F.rms_norm(stream, (50,), exact[2], 1e-5)
    loss = (y * grad_y.double()).sum() + (0.0 if grad_stream is None else (stream * grad_stream.double()).sum())
    loss.backward()
    assert_close(actual, named([y, stream], exact), TOLERANCE[dtype])


def run_rounded_norm(x, branch, weight):
    from megatron_blackmamba.ops.rms_norm import norm_and_stream

    y, stream = norm_and_stream(x, weight, 1e-5, branch, torch.bfloat16)
    return {"y": y, "stream": stream}


def test_norm_of_another_dtype_is_rounded_once(interpreted):
    x, branch, weight = random(7, 50, seed=0), random(7, 50, seed=4, dtype=torch.bfloat16), 1 + random(50, seed=1)
    actual = interpreted(run_rounded_norm, x, branch, weight)
    exact = F.rms_norm(x.double() + branch.double(), (50,), weight.double(), 1e-5)
    torch.testing.assert_close(actual["y"], exact.bfloat16(), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(actual["stream"], x + branch)


def run_norm_of_stream_alone(x, branch, weight, grad_stream):
    from megatron_blackmamba.ops.rms_norm import norm_and_stream

    leaves = leaves_of([x, branch, weight])
    _, stream = norm_and_stream(leaves[0], leaves[2], 1e-5, leaves[1])
    stream.backward(grad_stream)
    return {"x": leaves[0].grad, "branch": leaves[1].grad}


def test_stream_alone_passes_its_gradient_on(interpreted):
    x, branch = random(3, 8, seed=0), random(3, 8, seed=1, dtype=torch.bfloat16)
    grad = random(3, 8, seed=2)
    found = interpreted(run_norm_of_stream_alone, x, branch, torch.ones(8), grad)
    assert torch.equal(found["x"], grad) and torch.equal(found["branch"], grad.bfloat16())


def run_head_loss(x, weight, labels, grad, chunk):
    from megatron_blackmamba.ops import head_loss
    from megatron_blackmamba.ops.cross_entropy import triton as triton_cross_entropy

    triton_cross_entropy.BLOCK_V = 16
    head_loss.MOST_LOGITS, head_loss.TOKENS_UNKEPT = chunk * len(weight), chunk
    leaves = leaves_of([x, weight])
    assert head_loss.applies(*leaves)
    losses = head_loss.head_loss(*leaves, labels)
    losses.backward(grad)
    with torch.no_grad():
        unkept = head_loss.head_loss(*leaves, labels)
    return named([losses], leaves), unkept


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("chunk", "equal"), [(6, False), (4, False), (1, True)])
def test_head_loss_agrees_with_float64(interpreted, dtype, chunk, equal):
    x, weight = random(6, 24, seed=0, dtype=dtype), random(75, 24, seed=1, dtype=dtype, scale=0.7)
    grad = torch.full((6,), 0.3) if equal else random(6, seed=2)
    labels = torch.tensor([0, 74, 3, 16, 15, 40])
    actual, unkept = interpreted(run_head_loss, x, weight, labels, grad, chunk)
    assert torch.equal(unkept, actual["output 0"])
    exact = leaves_of([x, weight], torch.float64)
    losses = F.cross_entropy(exact[0] @ exact[1].t(), labels, reduction="none")
    losses.backward(grad.double())
    assert_close(actual, named([losses], exact), TOLERANCE[dtype])


def run_head_loss_with(x, weight, labels, grad, how):
    from megatron_blackmamba.ops import head_loss
    from megatron_blackmamba.ops.cross_entropy import triton as triton_cross_entropy

    triton_cross_entropy.BLOCK_V = 16
    leaves = leaves_of([x, weight])
    losses, log_sums = head_loss.head_loss_and_log_sum(*leaves, labels, **how)
    losses.backward(grad)
    return named([losses, log_sums], leaves)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", [{"z_loss": 0.1}, {"softcap": 2.0}, {"z_loss": 0.1, "softcap": 2.0}])
def test_head_loss_caps_logits_and_pulls_log_sums(interpreted, dtype, how):
    x, weight = random(6, 24, seed=0, dtype=dtype), random(75, 24, seed=1, dtype=dtype, scale=0.7)
    labels, grad, cap = torch.tensor([0, 74, 3, 16, 15, 40]), random(6, seed=2), how.get("softcap")
    actual = interpreted(run_head_loss_with, x, weight, labels, grad, how)
    exact = leaves_of([x, weight], torch.float64)
    logits = exact[0] @ exact[1].t()
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    losses, log_sums = F.cross_entropy(logits, labels, reduction="none"), logits.logsumexp(-1)
    (losses + how.get("z_loss", 0.0) * log_sums**2).backward(grad.double())
    assert_close(actual, named([losses, log_sums], exact), TOLERANCE[dtype])


def test_head_loss_keeps_what_is_not_finite(interpreted):
    """A guard looks at the loss and at the norm of the gradients: neither may look healthy."""
    x = random(3, 8, seed=0)
    x[1, 2] = float("nan")
    actual, _ = interpreted(run_head_loss, x, random(20, 8, seed=1), torch.tensor([1, 2, 3]), torch.ones(3), 3)
    assert actual["output 0"].isfinite().tolist() == [True, False, True]
    assert not actual["gradient 0"][1].isfinite().all() and not actual["gradient 1"].isfinite().all()
