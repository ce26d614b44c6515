"""Text from a model: prompts read in parallel, then one token at a time for all of them, in constant memory.

Shapes: B batch, L prompt length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_blackmamba.inference.captured import stepper
from megatron_blackmamba.inference.decoder import Decoder, State
from megatron_blackmamba.inference.sampling import GenerationError, Sampling, next_tokens
from megatron_blackmamba.inference.weights import fitting_dtype, pack
from megatron_blackmamba.interchange.canonical import tokenizer_of
from megatron_blackmamba.interchange.open import open_model
from megatron_blackmamba.tokenizer import Tokenizer

READ_AT_ONCE = 2048
"""Prompt tokens a batch reads at once: a longer prompt goes in pieces, from state to state."""


@dataclass
class Generator:
    """A model with its tokenizer.

    >>> model = load("exports/blackmamba")
    >>> model.generate("The state of a recurrent model", max_new_tokens=40)
    """

    decoder: Decoder
    tokenizer: Tokenizer | None = None

    def generate(self, prompt: str, *, max_new_tokens: int = 128, sampling: Sampling = Sampling()) -> str:
        """What comes after the prompt."""
        return "".join(self.stream(prompt, max_new_tokens=max_new_tokens, sampling=sampling))

    def stream(self, prompt: str, *, max_new_tokens: int = 128, sampling: Sampling = Sampling()) -> Iterator[str]:
        """The same, a piece of text at a time, as soon as its characters are whole."""
        return self._texts(self.tokens([self._encode(prompt)], max_new_tokens=max_new_tokens, sampling=sampling))

    def _texts(self, steps: Iterator[list[int | None]]) -> Iterator[str]:
        text = _Text(self._tokenizer())
        for tokens in steps:
            if tokens[0] is not None:
                yield text.add(tokens[0])
        yield text.rest()

    def generate_batch(
        self, prompts: Sequence[str], *, max_new_tokens: int = 128, sampling: Sampling = Sampling()
    ) -> list[str]:
        """What comes after each prompt; greedily, the same as one by one."""
        new: list[list[int]] = [[] for _ in prompts]
        encoded = [self._encode(prompt) for prompt in prompts]
        for tokens in self.tokens(encoded, max_new_tokens=max_new_tokens, sampling=sampling):
            for row, token in zip(new, tokens, strict=True):
                if token is not None:
                    row.append(token)
        return [self._tokenizer().decode(row) for row in new]

    def tokens(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = Sampling(),
        stop: int | None = None,
    ) -> Iterator[list[int | None]]:
        """The next token of each prompt, step by step; None once a row has ended, and nothing once all have.

        stop: the id that ends a row, by default the tokenizer's end of document.
        """
        if stop is None and self.tokenizer is not None:
            stop = self.tokenizer.eod_id
        if max_new_tokens < 1 or not prompts:
            return
        state = self.decoder.start(len(prompts))
        logits_BV = self._read(state, prompts)
        step = stepper(self.decoder, state)
        generators = sampling.generators(len(prompts))
        running = [True] * len(prompts)
        for n in range(max_new_tokens):
            tokens_B = next_tokens(logits_BV, sampling, generators)
            tokens = tokens_B.tolist()
            running = [goes_on and token != stop for goes_on, token in zip(running, tokens, strict=True)]
            if not any(running):
                return
            yield [token if goes_on else None for goes_on, token in zip(running, tokens, strict=True)]
            if n + 1 < max_new_tokens:
                logits_BV = step(tokens_B)

    def _read(self, state: State, prompts: Sequence[Sequence[int]]) -> Tensor:
        if not all(prompts):
            raise GenerationError("an empty prompt: give at least one token, such as the end-of-document token")
        lengths = [len(prompt) for prompt in prompts]
        L = max(lengths)
        tokens_BL = torch.tensor([[0] * (L - len(prompt)) + list(prompt) for prompt in prompts])
        tokens_BL = tokens_BL.to(self.decoder.weights.device)
        piece = max(1, READ_AT_ONCE // len(prompts))
        logits_BV = torch.empty(0)
        for start in range(0, L, piece):
            end = min(L, start + piece)
            inside_B = torch.tensor([min(max(n - (L - end), 0), end - start) for n in lengths])
            logits_BV = self.decoder.read(state, tokens_BL[:, start:end], inside_B.to(tokens_BL.device))
        return logits_BV

    def _encode(self, prompt: str) -> list[int]:
        tokenizer = self._tokenizer()
        return tokenizer.encode(prompt) or [tokenizer.eod_id]

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise GenerationError("this model came without a tokenizer: load it with tokenizer=FILE, or pass token ids")
        return self.tokenizer


def load(
    model: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    tokenizer: str | Path | None = None,
) -> Generator:
    """A model of any kind, ready to write: one of our checkpoints or runs, a Hugging Face export, released files.

    dtype: of the large matrices; by default as stored, or bf16 where fp32 would fill the memory.
    """
    where = _usable(device)
    source = open_model(Path(model), None if tokenizer is None else Path(tokenizer))
    text = tokenizer_of(source)
    weights = pack(source, dtype or fitting_dtype(source, where), where)
    return Generator(Decoder(weights), text)


def _usable(wanted: str | torch.device | None) -> torch.device:
    try:
        where = torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise GenerationError(f"a device is cpu, cuda or cuda:1, not {wanted!r}") from None
    if where.type == "cuda" and not torch.cuda.is_available():
        raise GenerationError("PyTorch finds no GPU here: take the cpu, or see `blackmamba doctor`")
    return where


class _Text:
    """Text from tokens as they come: a character may take several tokens, and is held back until it is whole."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.pending: list[int] = []
        self.before: list[int] = []
        """Tokens already given out, kept since how a token reads may depend on the one before it."""

    def add(self, token: int) -> str:
        self.pending.append(token)
        text = self._read()
        if text.endswith("\ufffd") and len(self.pending) < 8:
            return ""
        return self._release(text)

    def rest(self) -> str:
        return self._release(self._read()) if self.pending else ""

    def _read(self) -> str:
        known = self.tokenizer.decode(self.before)
        return self.tokenizer.decode(self.before + self.pending)[len(known) :]

    def _release(self, text: str) -> str:
        self.before, self.pending = self.pending, []
        return text
