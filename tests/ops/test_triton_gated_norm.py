"""The gated norm in Triton, interpreted, against its definition in float64."""

import pytest
import torch

pytest.importorskip("triton")

from tests.ops.implementations import assert_close, values_and_gradients
from tests.ops.interpreted import last_program_first
from tests.ops.test_gated_norm import definition

pytestmark = pytest.mark.xdist_group("triton")
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def drawn(channels, dtype, megatron, seed=0):
    """Return x, a gate that is a part of longer rows, weights, and a gradient, of 3 sequences with 5 tokens."""
    g = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(3, 5, channels, generator=g).to(dtype) for _ in range(2))
    gate = 3 * torch.randn(3, 5, channels + 7, generator=g)
    if megatron:
        x, gate, grad = (tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in (x, gate, grad))
    return {"x": x, "gate": gate.to(dtype), "weight": 1 + torch.randn(channels, generator=g).to(dtype)}, grad


def normed(x, gate, weight, groups, norm_first, backend):
    from megatron_blackmamba.ops.gated_norm import gated_rms_norm

    gate = gate[..., 3 : 3 + x.shape[-1]]
    return gated_rms_norm(x, gate, weight, groups, 1e-5, norm_first=norm_first, backend=backend)


def run(inputs, grad, groups, norm_first, tile):
    from megatron_blackmamba.ops.gated_norm import triton

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "TILE", tile)
        patch.setattr(triton, "programs", lambda x, tile: 4)  # several tokens each, not all as many
        last_program_first(patch)
        found = values_and_gradients(
            lambda x, gate, weight: normed(x, gate, weight, groups, norm_first, "triton"), grad, **inputs
        )
    return found, [found["y"].stride(i) for i in range(3)]


def expected(inputs, grad, groups, norm_first):
    exact = {name: x.double() for name, x in inputs.items()}
    cut = lambda x, gate, weight: definition(x, gate[..., 3 : 3 + x.shape[-1]], weight, groups, 1e-5, norm_first)
    return values_and_gradients(cut, grad, **exact)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("channels", "groups", "tile"), [(50, 1, 64), (51, 3, 64), (35, 7, 16), (6, 6, 4)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_agrees_with_float64(interpreted, channels, groups, tile, dtype, norm_first):
    inputs, grad = drawn(channels, dtype, megatron=groups == 3)
    actual, strides = interpreted(run, inputs, grad, groups, norm_first, tile)
    assert actual["y"].dtype == dtype and strides == [inputs["x"].stride(i) for i in range(3)]
    assert_close(actual, expected(inputs, grad, groups, norm_first), TOLERANCE[dtype])


def test_large_gates_stay_finite(interpreted):
    inputs, grad = drawn(50, torch.float32, megatron=False)
    inputs["gate"] *= 100
    actual, _ = interpreted(run, inputs, grad, 1, False, 64)
    assert_close(actual, expected(inputs, grad, 1, False), TOLERANCE[torch.float32])


def test_takes_tokens_without_sequences(interpreted):
    inputs, grad = drawn(12, torch.float32, megatron=False)
    rows = {name: x if x.dim() == 1 else x[0] for name, x in inputs.items()}
    actual, _ = interpreted(run_rows, rows, grad[0])
    assert_close(actual, expected(rows, grad[0], 2, False), TOLERANCE[torch.float32])


def run_rows(inputs, grad):
    return values_and_gradients(lambda *leaves: normed(*leaves, 2, False, "triton"), grad, **inputs), None


def test_mixed_precision_keeps_each_dtype(interpreted):
    """Decoding has weights in fp32 beside activations in bf16."""
    inputs, grad = drawn(12, torch.bfloat16, megatron=False)
    inputs["weight"] = inputs["weight"].float()
    actual, _ = interpreted(run, inputs, grad, 2, False, 64)
    dtypes = [actual[f"gradient of {name}"].dtype for name in inputs]
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert_close(actual, expected(inputs, grad, 2, False), TOLERANCE[torch.bfloat16])


def unsupported_by(x, gate, weight, groups):
    from megatron_blackmamba.ops.gated_norm import triton

    return triton.unsupported(x, gate, weight, groups)


def test_says_what_it_cannot_take(interpreted):
    x, weight = torch.zeros(1, 8194), torch.zeros(8194)
    assert interpreted(unsupported_by, x, x, weight, 2) is None
    assert interpreted(unsupported_by, x, x, weight, 1) == "up to 8192 channels of a group, not 8194"
    assert "a gate in torch.float64" in interpreted(unsupported_by, x, x.double(), weight, 2)
