import pytest
import torch
import torch.nn.functional as F

from megatron_blackmamba.ops.gated_norm import gated_rms_norm
from tests.ops.implementations import assert_close, values_and_gradients


def definition(x, gate, weight, groups, eps, norm_first):
    parts = (x if norm_first else x * F.silu(gate)).chunk(groups, dim=-1)
    y = weight * torch.cat([part / (part.square().mean(-1, keepdim=True) + eps).sqrt() for part in parts], dim=-1)
    return y * F.silu(gate) if norm_first else y


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
def test_agrees_with_float64(groups, norm_first, dtype, tolerance):
    g = torch.Generator().manual_seed(0)
    shapes = {"x": (5, 2, 12), "gate": (5, 2, 12), "weight": (12,)}
    inputs = {name: torch.randn(*shape, generator=g).to(dtype) for name, shape in shapes.items()}
    grad_y, exact = torch.randn(5, 2, 12, generator=g), {name: x.double() for name, x in inputs.items()}
    expected = values_and_gradients(lambda *leaves: definition(*leaves, groups, 1e-5, norm_first), grad_y, **exact)
    norm = lambda *leaves: gated_rms_norm(*leaves, groups, 1e-5, norm_first=norm_first)
    actual = values_and_gradients(norm, grad_y, **inputs)
    assert actual["y"].dtype == dtype
    assert_close(actual, expected, tolerance)


def test_wrong_shapes_are_refused():
    x = torch.zeros(2, 12)
    with pytest.raises(ValueError, match="weight \\(12,\\) in 5 groups"):
        gated_rms_norm(x, x, torch.ones(12), 5, 1e-5)
