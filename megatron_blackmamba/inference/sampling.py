"""From logits to the next token.

Shapes: B batch, V vocabulary.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor

COLDEST = 1e-300
"""Lower bound of the temperatures that are computed with: GPUs multiply by the reciprocal, which must be finite."""


class GenerationError(ValueError):
    """A generation request that cannot be fulfilled."""


@dataclass(frozen=True)
class Sampling:
    """Sampling options for the next token.

    Args:
        temperature: Divisor of the logits. 0 always takes the most likely token.
        top_k: Sample from the k most likely tokens. 0 means all tokens.
        top_p: Sample from the most likely tokens whose total probability is `top_p`.
        min_p: Sample from tokens with at least this probability, relative to the most likely token.
        repetition_penalty: Above 1 makes tokens of the prompt and of the generated text less likely.
        seed: Random seed. A text depends on seed, prompt and sample number only, not on the rest of the batch.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, Integral) or (isinstance(value, Real) and math.isfinite(value))):
                raise GenerationError(f"{field.name} must be a finite number, not {value!r}")
        if self.temperature < 0:
            raise GenerationError(f"temperature must be 0 or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise GenerationError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise GenerationError(f"top_k must be 0 (all tokens) or more, not {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise GenerationError(f"min_p must be between 0 and 1, not {self.min_p}")
        if self.repetition_penalty <= 0:
            raise GenerationError(f"repetition_penalty must be above 0 (1 disables it), not {self.repetition_penalty}")

    def streams(self, prompts: Sequence[Sequence[int]]) -> list[np.random.Generator]:
        """Return one random generator per prompt; a repeated prompt is its next sample."""
        seen: Counter[bytes] = Counter()
        result = []
        for prompt in prompts:
            digest = hashlib.sha256(f"{self.seed} {' '.join(map(str, prompt))}".encode()).digest()
            key = np.array([int.from_bytes(digest[:8], "little"), seen[digest]], dtype=np.uint64)
            result.append(np.random.Generator(np.random.Philox(key=key)))
            seen[digest] += 1
        return result


class Sampler:
    """A sampler of the next tokens of B rows, each with its own random generator.

    streams: the random numbers of each row, by default those of its prompt.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]],
        vocabulary: int,
        device: torch.device,
        streams: Sequence[np.random.Generator] | None = None,
    ):
        self.sampling = sampling
        self.streams = sampling.streams(prompts) if streams is None else streams
        self.seen_BV: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self.seen_BV = torch.zeros(len(prompts), vocabulary, dtype=torch.bool, device=device)
            for row, prompt in enumerate(prompts):
                self.seen_BV[row, torch.tensor(prompt, device=device)] = True

    @property
    def greedy(self) -> bool:
        """Return whether it takes the largest logits as they are."""
        return self.sampling.temperature == 0 and self.seen_BV is None

    def __call__(self, logits_BV: Tensor, likeliest_B: Tensor | None = None) -> Tensor:
        """Return the next token of each row.

        likeliest_B: the tokens with the largest logits, -1 for a row whose logits are not finite, if known.
        """
        if likeliest_B is not None and self.greedy:
            require_finite(min(likeliest_B.tolist()) >= 0)
            return likeliest_B.clone()  # which the next step overwrites
        require_finite(bool(torch.isfinite(logits_BV).all()))
        logits_BV = logits_BV.float()
        if self.seen_BV is not None:
            penalty = self.sampling.repetition_penalty
            less_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
            logits_BV = torch.where(self.seen_BV, less_BV.nan_to_num(0.0), logits_BV)  # a huge penalty overflows
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


def require_finite(finite: bool) -> None:
    if not finite:
        raise GenerationError("the logits are not finite: the model's weights contain NaN or are far too large")


def allowed(logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return the tokens, most likely first, and their fp64 weights, which are 0 for excluded tokens.

    The filters are applied in the order of transformers: top_k, top_p, min_p. The weights come first in the result.
    """
    scaled_BV, order_BV = logits_BV.double().sort(dim=-1, descending=True, stable=True)
    scaled_BV = (scaled_BV - scaled_BV[:, :1]) / max(sampling.temperature, COLDEST)  # at most 0: no NaN by overflow
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
