"""From logits to the next token.

Shapes: B batch, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


class GenerationError(ValueError):
    """Something that cannot be generated as asked."""


@dataclass(frozen=True)
class Sampling:
    """temperature 0 takes the likeliest token; top_p keeps the likeliest tokens that together have this probability."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise GenerationError(f"temperature is 0 or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise GenerationError(f"top_p is above 0 and at most 1, not {self.top_p}")

    def generators(self, batch: int) -> list[torch.Generator]:
        """One a row, so that what a row gets does not depend on its neighbours."""
        return [torch.Generator().manual_seed(self.seed + row) for row in range(batch)]


def next_tokens(logits_BV: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> Tensor:
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1)
    probabilities_BV = torch.softmax(logits_BV.float() / sampling.temperature, dim=-1).cpu()
    chosen = [
        _draw(probabilities_V, sampling.top_p, generator)
        for probabilities_V, generator in zip(probabilities_BV, generators, strict=True)
    ]
    return torch.stack(chosen).to(logits_BV.device)


def _draw(probabilities_V: Tensor, top_p: float, generator: torch.Generator) -> Tensor:
    if top_p == 1:
        return torch.multinomial(probabilities_V, 1, generator=generator)[0]
    values_V, order_V = probabilities_V.sort(descending=True)
    before_V = values_V.cumsum(dim=0) - values_V  # the likeliest token always stays
    drawn = torch.multinomial(values_V.masked_fill(before_V >= top_p, 0.0), 1, generator=generator)
    return order_V[drawn[0]]
