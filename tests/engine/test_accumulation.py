"""Weight gradients of several micro-batches and replicas equal those that megatron-core's wrapper adds up."""

import pytest
import torch

from megatron_blackmamba import model
from megatron_blackmamba.config import load
from megatron_blackmamba.engine.parts.accumulation import Accumulation, reduction
from megatron_blackmamba.runtime import world
from tests.training.short_runs import SMALL

from megatron.core.distributed import DistributedDataParallel

pytestmark = pytest.mark.xdist_group("short_runs")


SETTINGS = {
    "fp32": ["training.precision=fp32"],
    "bf16": ["training.precision=bf16"],
    "all bf16": ["training.precision=bf16", "optimizer.gradients=bf16"],
}


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
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
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
@pytest.mark.parametrize("precision", SETTINGS)
def test_gradients_equal_those_of_megatron_core(replicas, precision):
    batch = [f"training.global_batch={2 * replicas}", "training.overlap=false"]
    config = load("tiny", [*SMALL, *SETTINGS[precision], *batch])
    with world.fake(config.parallel, replicas, where="cpu") as place:
        expected = gradients(DistributedDataParallel, config, place, precision)
        actual = gradients(Accumulation, config, place, precision)
    for ours, theirs in zip(actual, expected, strict=True):
        for name in theirs:
            assert ours[name].dtype == (torch.bfloat16 if precision == "all bf16" else torch.float32)
            if replicas == 3:  # a third is not exact
                close = {"rtol": 3e-7, "atol": 1e-6}
                if precision == "all bf16":
                    close = {"rtol": 0, "atol": 2**-8 * 3 * float(theirs[name].abs().max())}
                torch.testing.assert_close(ours[name], theirs[name], **close)
            else:
                assert torch.equal(ours[name], theirs[name]), name
    assert not actual[1]["sometimes"].any()


def test_overlapped_reduction_begins_in_the_backward_pass():
    config = load("tiny", [*SMALL, "training.precision=fp32", "training.overlap=true"])
    with world.fake(config.parallel, 2, where="cpu") as place:
        settings = model.build(config, place).config
        net = Unused(torch.float32)
        reduced = Accumulation(settings, reduction(config, place.data_context_size), net)
        begun = []
        for _ in range(2):  # the first step only learns which weights have gradients
            reduced.zero_grad_buffer()
            reduced(torch.randn(4, 5), leave_out=False).sum().backward()
            begun.append([group.grad_reduce_handle is not None for group in reduced.bucket_groups])
            reduced.finish_grad_sync()
    assert all(begun[1])
