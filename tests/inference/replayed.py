"""CUDA graphs as they behave, without a GPU: fixed tensors that a replay reads and writes."""

from contextlib import contextmanager
from unittest import mock

import torch

from megatron_blackmamba.inference import captured


class Replayed(captured.Graph):
    """A step that is computed on every replay. Its warm-up leaves garbage in the state, as that of a graph does."""

    def __init__(self, decoder, state, pool):
        self.decoder, self.state, self.cuda_graph = decoder, state, self
        self.tokens_B = torch.zeros_like(state.last_B)
        self.logits_BV = decoder.step(state, self.tokens_B).clone()
        self.likeliest_B = self.logits_BV.argmax(dim=-1)

    def replay(self):
        self.logits_BV.copy_(self.decoder.step(self.state, self.tokens_B))
        self.likeliest_B.copy_(self.logits_BV.argmax(dim=-1))

    def pool(self):
        return "a pool"


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
