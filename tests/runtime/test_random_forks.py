"""Forks of the random-number tracker inside each other, as megatron-core's own tracker does them."""

import pytest
import torch

from megatron_blackmamba.config import ParallelConfig
from megatron_blackmamba.runtime import world

SEEDS = {"a": 11, "b": 22}


@pytest.fixture(scope="module")
def tracker():
    world.start(ParallelConfig())
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    yield tracker
    world.shutdown()


@pytest.fixture
def draw(tracker):
    """Draw numbers in the fork of a name; `inside` is called midway."""
    tracker.reset()
    for name, seed in SEEDS.items():
        tracker.add(name, seed)

    def draw(name, inside=list):
        with tracker.fork(name):
            return [*torch.rand(2).tolist(), *inside(), *torch.rand(2).tolist()]

    return draw


def numbers(name, count):
    return torch.rand(count, generator=torch.Generator().manual_seed(SEEDS[name])).tolist()


@pytest.mark.skipif(torch.cuda.is_available(), reason="forks the CPU's generator, which is so without CUDA")
def test_nested_forks_of_one_name_repeat_nothing(draw):
    before = torch.get_rng_state()
    drawn = draw("a", lambda: draw("b", lambda: draw("a")))
    assert drawn[:2] + drawn[4:8] + drawn[10:] == numbers("a", 8)
    assert drawn[2:4] + drawn[8:10] == numbers("b", 4)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="forks the CPU's generator, which is so without CUDA")
def test_an_unknown_name_is_refused_with_the_known(draw):
    with pytest.raises(KeyError, match=r"'c'.*a, b"):
        draw("c")


@pytest.mark.skipif(torch.cuda.is_available(), reason="forks the CPU's generator, which is so without CUDA")
def test_a_fork_that_fails_restores_the_generator(draw):
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        draw("a", lambda: 1 / 0)
    assert torch.equal(torch.get_rng_state(), before)
