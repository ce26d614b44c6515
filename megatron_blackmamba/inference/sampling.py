"""From logits to the next token.

Shapes: B batch, V vocabulary, K the most likely tokens, W those that top_k leaves.
"""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor

COLDEST = 1e-300
"""Lower bound of the temperatures that are computed with: GPUs multiply by the reciprocal, which must be finite."""

HEAD = 1024
"""How many of the most likely tokens are looked at first."""


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
        return self.choose(logits_BV)

    def choose(self, logits_BV: Tensor) -> Tensor:
        """Return the next token of each row; the logits are known to be finite."""
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
        uniform_B = torch.tensor([stream.random() for stream in self.streams], dtype=torch.float64)
        uniform_B1 = uniform_B.to(logits_BV.device)[:, None]
        if logits_BV.shape[-1] > 2 * HEAD:  # sorting all of them takes longer than the rest
            tokens_B, known_B = drawn(logits_BV, uniform_B1, self.sampling, HEAD)
            if bool(known_B.all()):
                return tokens_B
        return drawn(logits_BV, uniform_B1, self.sampling, logits_BV.shape[-1])[0]


def next_tokens(samplers: Sequence[Sampler], logits_BV: Tensor, likeliest: Sequence[int] | None = None) -> list[int]:
    """Return the next tokens of rows that have samplers of their own; -1 where the logits are not finite.

    Rows with equal options are drawn together: the texts are the same, the time is that of one.
    likeliest: the tokens with the largest logits, -1 as above, if known.
    """
    finite = [token >= 0 for token in likeliest] if likeliest else torch.isfinite(logits_BV).all(dim=-1).tolist()
    tokens, together = list(likeliest or [-1] * len(samplers)), defaultdict(list)
    for row, sampler in enumerate(samplers):
        if finite[row] and not (likeliest and sampler.greedy):
            together[sampler.sampling if sampler.seen_BV is None else row].append(row)
    for rows in together.values():
        one = samplers[rows[0]]
        if len(rows) > 1:
            streams = [stream for row in rows for stream in samplers[row].streams]
            one = Sampler(one.sampling, (), logits_BV.shape[-1], logits_BV.device, streams)
        for row, token in zip(rows, one.choose(logits_BV[rows]).tolist(), strict=True):
            tokens[row] = token
    return tokens


def require_finite(finite: bool) -> None:
    if not finite:
        raise GenerationError("the logits are not finite: the model's weights contain NaN or are far too large")


def drawn(logits_BV: Tensor, uniform_B1: Tensor, sampling: Sampling, among: int) -> tuple[Tensor, Tensor]:
    """Return a token of each row, and whether it is known to be what all logits give.

    uniform_B1: random numbers in [0, 1).
    among: how many of the most likely tokens to look at. That they suffice is not known if the drawn one may lie behind
        them, if the filters may admit others, or if it is as likely as the last of them, since ties go by token id.
    """
    weights_BK, order_BK, untied_B1 = allowed(logits_BV, sampling, among)
    ends_BK = weights_BK.cumsum(dim=-1)
    all_there_B1 = weights_BK[:, -1:] == 0
    if among >= logits_BV.shape[-1]:
        all_there_B1 = torch.ones_like(all_there_B1)
    total_B1 = torch.where(all_there_B1, ends_BK[:, -1:], 1.0)
    place_B1 = torch.searchsorted(ends_BK, uniform_B1 * total_B1, right=True)
    known_B1 = place_B1 < untied_B1
    known_B1 &= all_there_B1 if sampling.top_p < 1 or sampling.min_p else True
    last_B1 = (weights_BK > 0).sum(dim=-1, keepdim=True) - 1  # rounding must not lead past it
    return order_BK.gather(1, place_B1.minimum(last_B1))[:, 0], known_B1[:, 0]


def allowed(logits_BV: Tensor, sampling: Sampling, among: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fp64 weights of the likeliest tokens, which are 0 for excluded ones; these tokens, likeliest first;
    and how many of them are likelier than the last.

    The filters are applied in the order of transformers: top_k, top_p, min_p.
    """
    scaled_BK, order_BK, untied_B1 = likeliest_first(logits_BV, among)
    temperature, best_B1 = max(sampling.temperature, COLDEST), scaled_BK[:, :1]
    scaled_BK = (scaled_BK - best_B1) / temperature  # at most 0: no NaN by overflow
    if sampling.top_k:
        scaled_BK[:, sampling.top_k :] = -math.inf
    weights_BK = scaled_BK.exp()
    within = min(sampling.top_k or logits_BV.shape[-1], logits_BV.shape[-1])  # what top_k leaves of all tokens
    if within > weights_BK.shape[-1]:
        logits_BW = logits_BV.topk(within, dim=-1, sorted=False).values if sampling.top_k else logits_BV
        total_B1 = ((logits_BW.double() - best_B1) / temperature).exp().sum(dim=-1, keepdim=True)
    else:
        total_B1 = weights_BK.sum(dim=-1, keepdim=True)
    weights_BK = weights_BK / total_B1
    if sampling.top_p < 1:
        before_BK = weights_BK.cumsum(dim=-1) - weights_BK  # the likeliest token always stays
        weights_BK = weights_BK.masked_fill(before_BK >= sampling.top_p, 0.0)
    if sampling.min_p:
        weights_BK = weights_BK.masked_fill(weights_BK < sampling.min_p * weights_BK[:, :1], 0.0)
    return weights_BK, order_BK, untied_B1


def likeliest_first(logits_BV: Tensor, among: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logits in fp64, in order, equal ones by token id; their tokens; how many exceed the last."""
    if among >= logits_BV.shape[-1]:
        values_BV, order_BV = logits_BV.double().sort(dim=-1, descending=True, stable=True)
        return values_BV, order_BV, torch.full_like(order_BV[:, :1], order_BV.shape[-1])
    order_BK = logits_BV.topk(among, dim=-1, sorted=False).indices.sort(dim=-1).values
    values_BK, places_BK = logits_BV.gather(1, order_BK).double().sort(dim=-1, descending=True, stable=True)
    return values_BK, order_BK.gather(1, places_BK), (values_BK > values_BK[:, -1:]).sum(dim=-1, keepdim=True)
