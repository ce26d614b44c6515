"""Jobs of one or more prompts, and the rows of text that the engine writes for them.

Shapes: V vocabulary, L tokens, K experts of a token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from megatron_blackmamba.inference import Sampling
from megatron_blackmamba.inference.sampling import Sampler, require_finite
from megatron_blackmamba.inference.text import Text
from megatron_blackmamba.tokenizer import Tokenizer

Experts = list[list[int]]
"""Of one token: for each routed layer the token's experts."""


@dataclass(frozen=True)
class Token:
    """A token and its log-probability before temperature and filters; None for the first token of a prompt."""

    text: str
    logprob: float | None
    top: tuple[tuple[str, float], ...] = ()
    """The likeliest tokens at this place, the likeliest first."""
    characters: int = 0
    """Number of characters that begin in it."""


@dataclass(frozen=True)
class Written:
    """Some more of one row. A character may take several tokens, so a text may be empty."""

    row: int
    text: str = ""
    tokens: tuple[Token, ...] = ()
    """If log-probabilities were asked for."""
    experts: tuple[Experts, ...] = ()
    """If asked for, of the tokens that the model has read since the last piece, from the prompt's first token on."""
    written: int = 0
    """In the last piece of a row: the number of tokens generated for it, the end of document included."""
    finished: Literal["stop", "length"] | None = None


@dataclass(frozen=True)
class Failed:
    """The end of a job that cannot go on."""

    message: str


@dataclass(eq=False)
class Job:
    """A request as the engine sees it. `emit` is called on the engine's thread."""

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    max_new_tokens: int
    emit: Callable[[Written | Failed], None]
    samples: int = 1
    stop: Sequence[str] = ()
    logprobs: int | None = None
    """Number of likeliest tokens to report at each place; None reports no probabilities."""
    echo: bool = False
    """Report the prompt's tokens too."""
    experts: bool = False
    cancelled: bool = False
    """Set from any thread; the engine drops the rows before its next step."""

    @property
    def rows(self) -> int:
        """Number of texts."""
        return len(self.prompts) * self.samples


@dataclass
class Row:
    """One text of a job while it is written."""

    job: Job
    number: int
    text: Text
    sampler: Sampler
    written: int = 0
    last: int = -1

    def advance(self, token: int, logits_V: Tensor, tokenizer: Tokenizer, experts: Sequence[Experts] = ()) -> bool:
        """Emit what the next token adds; return whether the row goes on.

        token: -1 if the logits are not finite.
        experts: of the tokens read since the last call.
        """
        require_finite(token >= 0)
        read = tuple(experts) if self.job.experts else ()
        told: tuple[Token, ...] = ()
        if self.job.logprobs is not None:
            told = told_tokens(logits_V[None], [token], self.job.logprobs, tokenizer, not self.text.before)
        self.last, self.written = token, self.written + 1
        if token == tokenizer.eod_id:
            told = tuple(replace(one, text="", characters=0) for one in told)
            self.job.emit(Written(self.number, self.text.rest(), told, read, self.written, "stop"))
            return False
        text = self.text.add(token)
        finished: Literal["stop", "length"] | None = None
        if self.text.stopped:
            finished = "stop"
        elif self.written >= self.job.max_new_tokens:
            text += self.text.rest()
            finished = "stop" if self.text.stopped else "length"
        if text or told or read or finished:
            self.job.emit(Written(self.number, text, told, read, self.written if finished else 0, finished))
        return finished is None


def rows_of(job: Job, tokenizer: Tokenizer, vocabulary: int, device: torch.device) -> list[Row]:
    """Return the rows of a job, the samples of a prompt next to each other, as `blackmamba generate` numbers them."""
    repeated = [prompt for prompt in job.prompts for _ in range(job.samples)]
    streams = job.sampling.streams(repeated)
    rows = []
    for number, (prompt, stream) in enumerate(zip(repeated, streams, strict=True)):
        sampler = Sampler(job.sampling, [prompt], vocabulary, device, [stream])
        rows.append(Row(job, number, Text(tokenizer, job.stop, prompt), sampler))
    return rows


def told_tokens(
    logits_LV: Tensor, tokens: Sequence[int], top: int, tokenizer: Tokenizer, first: bool = False
) -> tuple[Token, ...]:
    """Return the tokens with their log-probabilities; row l of the logits is for token l.

    first: Spell them as the first of a text.
    """
    logprobs_LV = torch.log_softmax(logits_LV.float(), dim=-1)
    index_L1 = torch.tensor(tokens, device=logits_LV.device)[:, None]
    own = logprobs_LV.gather(1, index_L1)[:, 0].tolist()
    values_LK, ids_LK = logprobs_LV.topk(min(top, logits_LV.shape[-1]), dim=-1)
    best = [
        tuple((tokenizer.spelled(i, first)[0], value) for i, value in zip(ids, values, strict=True))
        for ids, values in zip(ids_LK.tolist(), values_LK.tolist(), strict=True)
    ]
    spelled = [tokenizer.spelled(token, first) for token in tokens]
    return tuple(Token(text, p, b, size) for (text, size), p, b in zip(spelled, own, best, strict=True))
