"""From logits to the next token.

Shapes: B batch, V vocabulary.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor


class GenerationError(ValueError):
    """Something that cannot be generated as asked."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    temperature: 0 takes the likeliest token; above, logits are divided by it before a token is drawn.
    top_k: draw from the k likeliest tokens; 0 from all.
    top_p: draw from the likeliest tokens that together have this probability.
    min_p: draw from tokens at least this fraction as likely as the likeliest.
    repetition_penalty: above 1, tokens of the prompt and of the text so far become less likely.
    seed: what a prompt gets depends on the seed, the prompt and the number of the sample, not on its neighbours.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not math.isfinite(getattr(self, field.name)):
                raise GenerationError(f"{field.name} is a finite number, not {getattr(self, field.name)}")
        if self.temperature < 0:
            raise GenerationError(f"temperature is 0 or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise GenerationError(f"top_p is above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise GenerationError(f"top_k is 0 (all tokens) or more, not {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise GenerationError(f"min_p is between 0 and 1, not {self.min_p}")
        if self.repetition_penalty <= 0:
            raise GenerationError(f"repetition_penalty is above 0 (1 changes nothing), not {self.repetition_penalty}")

    def streams(self, prompts: Sequence[Sequence[int]]) -> list[np.random.Generator]:
        """Return the random numbers of each prompt; a prompt that comes again is its next sample."""
        seen: Counter[bytes] = Counter()
        result = []
        for prompt in prompts:
            digest = hashlib.sha256(f"{self.seed} {' '.join(map(str, prompt))}".encode()).digest()
            key = np.array([int.from_bytes(digest[:8], "little"), seen[digest]], dtype=np.uint64)
            result.append(np.random.Generator(np.random.Philox(key=key)))
            seen[digest] += 1
        return result


class Sampler:
    """Draws the tokens of B rows, each from random numbers of its own."""

    def __init__(self, sampling: Sampling, prompts: Sequence[Sequence[int]], vocabulary: int, device: torch.device):
        self.sampling = sampling
        self.streams = sampling.streams(prompts)
        self.seen_BV: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self.seen_BV = torch.zeros(len(prompts), vocabulary, dtype=torch.bool, device=device)
            for row, prompt in enumerate(prompts):
                self.seen_BV[row, torch.tensor(prompt, device=device)] = True

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """Return the next token of each row."""
        if not bool(torch.isfinite(logits_BV).all()):
            raise GenerationError(
                "the logits are not finite numbers: the model's weights hold NaN or are far too large"
            )
        logits_BV = logits_BV.float()
        if self.seen_BV is not None:
            penalty = self.sampling.repetition_penalty
            less_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
            logits_BV = torch.where(self.seen_BV, less_BV, logits_BV)
        tokens_B = logits_BV.argmax(dim=-1) if self.sampling.temperature == 0 else self._draw(logits_BV)
        if self.seen_BV is not None:
            self.seen_BV.scatter_(1, tokens_B[:, None], True)
        return tokens_B

    def _draw(self, logits_BV: Tensor) -> Tensor:
        weights_BV, order_BV = allowed(logits_BV, self.sampling)
        ends_BV = weights_BV.cumsum(dim=-1)
        uniform_B = torch.tensor([stream.random() for stream in self.streams], dtype=torch.float64)
        aims_B1 = uniform_B.to(ends_BV.device)[:, None] * ends_BV[:, -1:]
        last_B1 = (weights_BV > 0).sum(dim=-1, keepdim=True) - 1  # rounding must not lead past it
        place_B1 = torch.searchsorted(ends_BV, aims_B1, right=True).minimum(last_B1)
        return order_BV.gather(1, place_B1)[:, 0]


def allowed(logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return fp64 weights of the tokens, likeliest first and 0 where not allowed, and the tokens in that order.

    The filters come in transformers' order: top_k, top_p, then min_p.
    """
    scaled_BV, order_BV = (logits_BV.double() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        scaled_BV[:, sampling.top_k :] = -math.inf
    probabilities_BV = torch.softmax(scaled_BV, dim=-1)
    if sampling.top_p < 1:
        before_BV = probabilities_BV.cumsum(dim=-1) - probabilities_BV  # the likeliest token always stays
        probabilities_BV = probabilities_BV.masked_fill(before_BV >= sampling.top_p, 0.0)
    if sampling.min_p:
        probabilities_BV = probabilities_BV.masked_fill(
            probabilities_BV < sampling.min_p * probabilities_BV[:, :1], 0.0
        )
    return probabilities_BV, order_BV
