import pytest
import torch
import torch.nn.functional as F

from megatron_blackmamba.ops.gated_norm import gated_rms_norm
from tests.ops.implementations import assert_close


def values_and_gradients(function, x, gate, weight, groups):
    leaves = {"x": x, "gate": gate, "weight": weight}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in leaves.items()}
    y = function(*leaves.values(), groups, 1e-5)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype))
    return {"y": y.detach()} | {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}


def definition(x, gate, weight, groups, eps):
    parts = (x * F.silu(gate)).chunk(groups, dim=-1)
    return weight * torch.cat([part / (part.square().mean(-1, keepdim=True) + eps).sqrt() for part in parts], dim=-1)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
def test_agrees_with_float64(groups, dtype, tolerance):
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=g).to(dtype) for shape in ((5, 2, 12), (5, 2, 12), (12,))]
    expected = values_and_gradients(definition, *(x.double() for x in inputs), groups)
    actual = values_and_gradients(gated_rms_norm, *inputs, groups)
    assert actual["y"].dtype == dtype
    assert_close(actual, expected, tolerance)


def test_wrong_shapes_are_refused():
    x = torch.zeros(2, 12)
    with pytest.raises(ValueError, match="weight \\(12,\\) in 5 groups"):
        gated_rms_norm(x, x, torch.ones(12), 5, 1e-5)
