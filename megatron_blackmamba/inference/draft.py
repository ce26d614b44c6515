"""Self-speculation: the extra depth of a model (model.mtp) guesses a token, and the model reads two tokens at once.

At batch 1 a pass takes as long as memory takes to deliver the weights, for one token as for two. If the guess was
right, the second token's logits are there already. If not, the state goes back, and the two true tokens are read. So
each pass yields a token or two, and all logits are the model's own, whatever the sampler makes of them.

Shapes: L length, D model, V vocabulary; the batch is 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_blackmamba.inference.decoder import READ_AT_ONCE, Decoder, State, rms_norm
from megatron_blackmamba.inference.weights import Weights, decodings
from megatron_blackmamba.layers import Inputs


def why_no_draft(weights: Weights) -> str | None:
    """Return why a model cannot draft for itself, or None."""
    if weights.extra is None:
        return "has no extra depth that could draft (model.mtp.pattern of a checkpoint)"
    if weights.dtype != torch.float32 or weights.device.type != "cpu":
        return "drafts in fp32 on CPUs only, where one and two tokens at once give equal logits (--dtype fp32)"
    return None


class Guessing:
    """A step of the decoder which reads ahead. The true tokens come one by one, as without it."""

    def __init__(self, decoder: Decoder, prompt: Sequence[int]):
        self.decoder, self.state = decoder, decoder.start(1)
        self.draft = Draft(decoder)
        self.passes = 0
        """Passes of the model after the prompt."""
        prompt_1L = torch.tensor([prompt])
        for start in range(0, len(prompt), READ_AT_ONCE):
            here_1L = prompt_1L[:, start : start + READ_AT_ONCE]
            next_1L = prompt_1L[:, start + 1 : start + 1 + READ_AT_ONCE]
            stream_1LD = decoder.stream(self.state, here_1L)
            if known := next_1L.shape[1]:  # what follows the last token is not
                self.draft.read(stream_1LD[:, :known], next_1L, here_1L[:, :known])
        self.stream_1D = stream_1LD[:, -1]
        self.logits_1V = decoder.logits_of_stream(self.stream_1D)
        """Of the first token after the prompt."""
        self._last = prompt[-1]
        self._ahead: tuple[int, State, Tensor] | None = None
        """A guess that has been read: the token before it, the state before both, and the streams behind both."""
        self._guess = -1

    @torch.inference_mode()
    def __call__(self, tokens_1: Tensor) -> Tensor:
        """Return the logits after one more token."""
        token = int(tokens_1)
        if self._ahead is None:
            self._guess = self.guess(token)
            before = self.state.rows(torch.zeros(1, dtype=torch.long))
            stream_2D = self._pass([token, self._guess])
            self._ahead = token, before, stream_2D
            self.stream_1D = stream_2D[:1]
        else:
            previous, before, stream_2D = self._ahead
            if token != self._guess:
                self.state = before
                stream_2D = self._pass([previous, token])
            self.stream_1D = stream_2D[:1]
            self._drafted(token)
            self._ahead, self.stream_1D = None, stream_2D[1:]
        return self.decoder.logits_of_stream(self.stream_1D)

    def guess(self, token: int) -> int:
        """Return the extra depth's guess of the token after this one."""
        return int(self.decoder.logits(self._drafted(token)).argmax())

    def _drafted(self, token: int) -> Tensor:
        """Return what the head reads to guess the token after this one, `[1, D]`."""
        stream_11D = self.stream_1D[:, None]
        drafted_1D = self.draft.read(stream_11D, torch.tensor([[token]]), torch.tensor([[self._last]]))
        self._last = token
        return drafted_1D

    def _pass(self, tokens: list[int]) -> Tensor:
        self.passes += 1
        return self.decoder.stream(self.state, torch.tensor([tokens]))[0]


class Draft:
    """The extra depth as a recurrence over the places of one sequence."""

    def __init__(self, decoder: Decoder):
        weights = decoder.weights
        assert weights.extra is not None
        self.decoder, self.weights, self.config = decoder, weights.extra, weights.config
        self.how = decodings(weights.config, weights.config.mtp.pattern)
        self.memories = [how.memory(self.config, 1, weights.dtype, weights.device) for how in self.how]

    @torch.inference_mode()
    def read(self, stream_1LD: Tensor, next_1L: Tensor, tokens_1L: Tensor) -> Tensor:
        """Return what the head reads to guess the tokens after the next ones, `[L, D]`.

        Args:
            stream_1LD: The model's stream behind `tokens_1L`, the tokens at these places.
            next_1L: The tokens after them.
        """
        eps, weights = self.config.norm_eps, self.weights
        reset_1L = None if self.config.eod_reset is None else tokens_1L == self.config.eod_reset
        inputs = Inputs(next_1L, None, reset_1L)
        embedded_1LD = rms_norm(self.decoder.embedded(next_1L), weights.embedding_norm_D, eps)
        read_1LD = stream_1LD if self.config.mtp.reads == "stream" else self.decoder.normed(stream_1LD)
        both_1LC = torch.cat([embedded_1LD, rms_norm(read_1LD, weights.hidden_norm_D, eps)], dim=-1)
        residual_1LD = both_1LC @ weights.proj_DC.T
        for how, layer, norm_D, memory in zip(self.how, weights.layers, weights.norms_D, self.memories, strict=True):
            x_1LD = rms_norm(residual_1LD, norm_D, eps)
            y_1LD = how.read(self.decoder, layer, memory, x_1LD, inputs)
            residual_1LD = residual_1LD + y_1LD * self.config.multipliers.residual
        return rms_norm(residual_1LD, weights.final_norm_D, eps)[0]
