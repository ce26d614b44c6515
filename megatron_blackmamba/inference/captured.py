"""A decoding step as one launch: on CUDA the whole step is captured once for a batch size and then replayed.

Unmeasured: written for GPUs, run on none yet.

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
        return _captured(decoder, state)
    return lambda tokens_B: decoder.step(state, tokens_B)


def _captured(decoder: Decoder, state: State) -> Step:
    """Capture a step as a CUDA graph on these tensors; replaying it costs one launch instead of several hundred."""
    tokens_B = torch.zeros_like(state.last_B)
    kept = state.rows(torch.arange(len(tokens_B), device=tokens_B.device))  # warming up moves the state; undo that
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            decoder.step(state, tokens_B)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits_BV = decoder.step(state, tokens_B)
    state.copy_(kept)

    def step(new_B: Tensor) -> Tensor:
        tokens_B.copy_(new_B)
        graph.replay()
        return logits_BV

    return step
