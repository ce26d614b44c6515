"""A decoding step as one launch: on CUDA the whole step is captured once for a batch size and then replayed.

Shapes: B batch, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_blackmamba.inference.decoder import Decoder, State

Step = Callable[[Tensor], Tensor]


def stepper(decoder: Decoder, state: State) -> Step:
    """Return a function that maps the last tokens to the next logits and updates `state` in place."""
    if state.last_B.is_cuda and not decoder.grows:  # a captured step reads and writes tensors of one size
        return Captured(decoder, state)
    return lambda tokens_B: decoder.step(state, tokens_B)


class Captured:
    """A step captured as a CUDA graph; replaying it costs one launch instead of several hundred.

    The graph knows addresses alone, so this keeps the weights and the state that lie there. It is captured on their
    GPU: where another one is current, the capture would be empty.
    """

    def __init__(self, decoder: Decoder, state: State):
        self.decoder, self.state = decoder, state
        with torch.cuda.device_of(state.last_B):
            self._capture()

    def _capture(self) -> None:
        decoder, state = self.decoder, self.state
        self.tokens_B = torch.zeros_like(state.last_B)
        rows_B = torch.arange(len(self.tokens_B), device=self.tokens_B.device)
        kept = state.rows(rows_B)  # warming up moves the state; undo that
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                decoder.step(state, self.tokens_B)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits_BV = decoder.step(state, self.tokens_B)
        state.copy_(kept)

    def __call__(self, new_B: Tensor) -> Tensor:
        with torch.cuda.device_of(self.tokens_B):
            self.tokens_B.copy_(new_B)
            self.graph.replay()
        return self.logits_BV
