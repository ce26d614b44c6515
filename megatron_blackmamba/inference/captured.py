"""A decoding step as one launch: on CUDA the whole step is captured once for a batch size and then replayed.

The graphs live as long as the decoder. They share one state, whose first rows each of them reads and writes.

Shapes: B batch, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.inference.decoder import Decoder, State
from megatron_blackmamba.ops import decoding

Step = Callable[[Tensor], Tensor]
FEWEST = 8
"""Sequences that the graphs' state has room for at first."""


def stepper(decoder: Decoder, state: State) -> Step:
    """Return a function that maps the last tokens to the next logits and takes the sequences of `state` further.

    A captured step works on a copy of `state`; `Captured.settled` brings that up to date.
    """
    if captures(decoder):
        return Captured(decoder, state)
    return lambda tokens_B: decoder.step(state, tokens_B)


def captures(decoder: Decoder) -> bool:
    """Return whether steps are captured: on CUDA, if the tensors that a step reads and writes keep their size."""
    return decoder.weights.device.type == "cuda" and not decoder.grows


class Captured:
    """Some sequences that a graph takes further; each step costs one launch instead of several hundred.

    Sequences of several callers may take turns. The state of the last one stays in the graphs until another comes.
    """

    def __init__(self, decoder: Decoder, state: State):
        self.graphs = graphs_of(decoder)
        self.state = state
        self.graph = self.graphs.of_size(len(state.last_B))

    def __call__(self, new_B: Tensor) -> Tensor:
        """Return the logits after one more token of each sequence; the next call overwrites them."""
        graphs = self.graphs
        with torch.cuda.device_of(self.state.last_B):
            if graphs.turn is not self:
                graphs.settle()
                self.graph.state.copy_(self.state)
                graphs.turn = self
            self.graph.tokens_B.copy_(new_B)
            self.graph.cuda_graph.replay()
        return self.graph.logits_BV

    @property
    def likeliest_B(self) -> Tensor | None:
        """Return the likeliest tokens by the last step's logits, -1 where those are not all finite, if known."""
        return self.graph.likeliest_B

    def settled(self) -> State:
        """Return the state after the last step; the next step starts from there."""
        if self.graphs.turn is self:
            self.graphs.settle()
        return self.state


class Graph:
    """A step captured for one batch size."""

    def __init__(self, decoder: Decoder, state: State, pool: Any):
        self.state = state
        self.tokens_B = torch.zeros_like(state.last_B)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                decoder.step(state, self.tokens_B)
        torch.cuda.current_stream().wait_stream(side)
        self.cuda_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.cuda_graph, pool=pool):
            self.logits_BV = decoder.step(state, self.tokens_B)
            self.likeliest_B = decoding.likeliest(self.logits_BV)


class Graphs:
    """The captured steps of a decoder, by batch size."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        self.addresses = decoder.weights.addresses()
        self.by_size: dict[int, Graph] = {}
        self.state = decoder.start(0)
        self.turn: Captured | None = None
        """The sequences whose state the graphs hold."""

    def settle(self) -> None:
        """Give the state back to the sequences that it belongs to."""
        if self.turn is not None:
            self.turn.state.copy_(self.turn.graph.state)
        self.turn = None

    def of_size(self, rows: int) -> Graph:
        """Return the graph for a batch size, captured on the weights' device."""
        if rows not in self.by_size:
            with torch.cuda.device_of(self.decoder.weights.embedding_VD):
                self.settle()
                self.reserve(rows)
                self.by_size[rows] = Graph(self.decoder, self.state.first(rows), self.pool())
        return self.by_size[rows]

    def pool(self) -> Any:
        """Return the memory pool of a graph that still lives, or None; a pool ends with the last graph in it."""
        return next((graph.cuda_graph.pool() for graph in self.by_size.values()), None)

    def reserve(self, rows: int) -> None:
        """Make the state large enough for so many sequences; graphs of a smaller state are captured again."""
        if rows > len(self.state.last_B):
            self.settle()
            self.by_size.clear()
            self.state = self.decoder.start(max(FEWEST, 1 << (rows - 1).bit_length()))


def likeliest(step: Step) -> Tensor | None:
    """Return the likeliest tokens by the logits that a step returned last, if it knows them."""
    return step.likeliest_B if isinstance(step, Captured) else None


def graphs_of(decoder: Decoder) -> Graphs:
    """Return the decoder's graphs; new ones if its weights were replaced, since a graph knows addresses alone."""
    kept = decoder.graphs
    if not isinstance(kept, Graphs) or kept.addresses != decoder.weights.addresses():
        if isinstance(kept, Graphs):
            kept.settle()
        kept = decoder.graphs = Graphs(decoder)
    return kept
