"""Weight gradients of several micro-batches and replicas equal those that megatron-core's wrapper adds up."""

import pytest
import torch

from megatron_blackmamba import model
from megatron_blackmamba.config import load
from megatron_blackmamba.runtime import world
from megatron_blackmamba.runtime.reduction import reduction
from megatron_blackmamba.training.accumulation import Accumulation
from tests.training.short_runs import SMALL

from megatron.core.distributed import DistributedDataParallel

pytestmark = pytest.mark.xdist_group("short_runs")


class Unused(torch.nn.Module):
    """A model of which some micro-batches leave out a weight."""

    def __init__(self, dtype):
        super().__init__()
        self.used = torch.nn.Parameter(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(dtype))
        self.sometimes = torch.nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x, leave_out):
        y = x @ self.used
        return y if leave_out else y * self.sometimes


def gradients(wrapper, config, place, precision):
    """Return the gradients of two steps of two micro-batches; the second leaves a weight out."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    net, settings = Unused(dtype), model.build(config, place).config
    reduced = wrapper(settings, reduction(config, place.data_context_size), net)
    found = []
    for step, leave_out in enumerate([False, True]):
        reduced.zero_grad_buffer()
        for batch in range(2):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2 * step + batch)).to(dtype)
            reduced(x, leave_out).float().square().sum().backward()
        reduced.finish_grad_sync()
        found.append({name: p.main_grad.clone() for name, p in net.named_parameters()})
    return found


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_equal_those_of_megatron_core(replicas, precision):
    config = load(
        "tiny",
        [*SMALL, f"training.precision={precision}", f"training.global_batch={2 * replicas}", "training.overlap=false"],
    )
    with world.fake(config.parallel, replicas, where="cpu") as place:
        expected = gradients(DistributedDataParallel, config, place, precision)
        actual = gradients(Accumulation, config, place, precision)
    for ours, theirs in zip(actual, expected, strict=True):
        for name in theirs:
            if replicas == 3:  # a third is not exact
                torch.testing.assert_close(ours[name], theirs[name], rtol=3e-7, atol=1e-6)
            else:
                assert torch.equal(ours[name], theirs[name]), name
    assert not actual[1]["sometimes"].any()
