"""The update exchanges nothing with nobody and each weight once, and gives the weights that megatron-core gives."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_blackmamba import model
from megatron_blackmamba.config import load
from megatron_blackmamba.runtime import world
from megatron_blackmamba.training.step.optimizer import make_trainable
from tests.training.short_runs import SMALL

pytestmark = pytest.mark.xdist_group("short_runs")


class Exchanges(TorchDispatchMode):
    """The reductions and gathers inside, by their kind."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        for kind in ("reduce_scatter", "allgather"):
            self.counts[kind] += str(operation).startswith(f"c10d.{kind}")
        return operation(*args, **(kwargs or {}))


def trainable_of(config, place, skip=frozenset()):
    torch.manual_seed(0)
    return make_trainable(config, model.build(config, place), place, skip)


def update(trainable, seed):
    """Reduce the same gradients at every call with this seed, and update the weights."""
    generator = torch.Generator().manual_seed(seed)
    trainable.reduced.zero_grad_buffer()
    trainable.reduced.outdated.clear()
    for weight in trainable.model.parameters():
        weight.main_grad.copy_(torch.randn(weight.shape, generator=generator))
    trainable.reduced.finish_grad_sync()
    trainable.optimizer.step()


@pytest.mark.parametrize(("ranks", "expert", "groups"), [(1, 1, 0), (2, 2, 1), (2, 1, 2)])
def test_weights_are_exchanged_once_among_several_ranks(ranks, expert, groups):
    """groups: dense weights and experts', but for those that no other rank holds."""
    words = [f"parallel.expert={expert}", f"training.global_batch={2 * ranks}", "training.overlap=false"]
    config = load("tiny", [*SMALL, *words])
    with world.fake(config.parallel, ranks, where="cpu") as place:
        trainable = trainable_of(config, place)
        with Exchanges() as exchanges:
            update(trainable, 0)
    assert exchanges.counts == {"reduce_scatter": groups, "allgather": groups}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_equal_those_of_the_whole_update(precision):
    config = load("tiny", [*SMALL, f"training.precision={precision}"])
    with world.fake(config.parallel, 1, where="cpu") as place:
        ours = trainable_of(config, place)
        whole = trainable_of(config, place, frozenset({"update-once"}))
        for seed in range(2):
            before = [weight.clone() for weight in ours.model.parameters()]
            update(ours, seed)
            update(whole, seed)
        for old, one, other in zip(before, ours.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(one, other)
            assert not torch.equal(one, old)
