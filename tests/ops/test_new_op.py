"""The op of CONTRIBUTING.md's example: each implementation against float64, and the choice of one."""

import pytest
import torch

from megatron_blackmamba.ops import backends
from tests.ops.implementations import assert_close, values_and_gradients
from tests.ops.squared import available_backends, squared

pytestmark = pytest.mark.xdist_group("triton")


def run(x, grad_y, backend):
    return values_and_gradients(lambda x: squared(x, backend=backend), grad_y, x=x)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_new_op_agrees_with_float64(interpreted, backend, dtype, tolerance):
    pytest.importorskip("triton")
    x, grad_y = torch.randn(2, 3, 701, generator=torch.Generator().manual_seed(0)).to(dtype).unbind()
    expected = values_and_gradients(lambda x: x.clamp(min=0) ** 2, grad_y.double(), x=x.double())
    assert_close(interpreted(run, x, grad_y, backend), expected, tolerance)


def test_new_op_runs_where_no_kernel_does():
    assert available_backends()["reference"] is None
    x = torch.tensor([-1.0, 2.0], dtype=torch.float64)
    assert squared(x).tolist() == [0.0, 4.0]
    assert backends.exact("tests.ops.squared") == ["reference"]
    with pytest.raises(ValueError, match="squared cannot run here: triton: "):
        squared(x, backend="triton")
