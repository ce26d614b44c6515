"""The first values of a step that are not finite, by rank and micro-batch."""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_blackmamba.training.watch import finite
from megatron_blackmamba.training.watch.finite import FirstSeen


@pytest.fixture
def first_seen(monkeypatch):
    """A FirstSeen of rank 0 alone and the layers that it watches."""
    monkeypatch.setattr(finite.dist, "all_gather_object", lambda everywhere, here: everywhere.__setitem__(0, here))
    decoder = torch.nn.Linear(2, 2)
    decoder.pre_process = True
    return FirstSeen(SimpleNamespace(rank=0, size=1), SimpleNamespace(decoder=decoder)), decoder


def micro_batch(seen, decoder, samples, scale=1.0, shown=0.0):
    seen.batch(torch.tensor(samples))
    loss = (decoder(torch.ones(1, 2, requires_grad=True)) * scale).sum()
    seen.loss(torch.tensor(shown))
    loss.backward()


def test_a_new_step_forgets_the_one_before(first_seen):
    seen, decoder = first_seen
    micro_batch(seen, decoder, [0, 1], scale=math.inf)
    seen.begin()
    micro_batch(seen, decoder, [2, 3])
    assert seen.gather() == []
