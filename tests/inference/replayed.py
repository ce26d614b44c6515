"""CUDA graphs as they behave, without a GPU: fixed tensors that a replay reads and writes."""

import weakref
from collections import Counter
from contextlib import contextmanager
from typing import ClassVar
from unittest import mock

import torch

from megatron_blackmamba.inference import captured


class Replayed(captured.Graph):
    """A step that is computed on every replay. Its warm-up leaves garbage in the state, as that of a graph does."""

    living: ClassVar = Counter()
    """Graphs in each memory pool. PyTorch refuses a pool without one."""

    def __init__(self, decoder, state, pool):
        assert pool is None or self.living[pool], "the pool of graphs that no longer live"
        self.of_pool = object() if pool is None else pool
        self.living[self.of_pool] += 1
        weakref.finalize(self, self.living.subtract, [self.of_pool])
        self.decoder, self.state = decoder, state
        self.tokens_B = torch.zeros_like(state.last_B)
        self.logits_BV = decoder.step(state, self.tokens_B).clone()
        self.likeliest_B = self.logits_BV.argmax(dim=-1)

    @property
    def cuda_graph(self):
        return self

    def replay(self):
        self.logits_BV.copy_(self.decoder.step(self.state, self.tokens_B))
        self.likeliest_B.copy_(self.logits_BV.argmax(dim=-1))

    def pool(self):
        return self.of_pool


@contextmanager
def graphs():
    """Capture steps of decoders on CPUs."""
    captures = mock.patch.object(captured, "captures", lambda decoder: not decoder.grows)
    with (
        captures,
        mock.patch.object(captured, "Graph", Replayed),
        mock.patch("megatron_blackmamba.serving.engine.captures", captured.captures),
    ):
        yield
