"""Text from a model: prompts read in parallel, then one token at a time for all of them, in constant memory.

Shapes: B batch, L prompt length.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.inference.captured import Step, likeliest, stepper
from megatron_blackmamba.inference.decoder import READ_AT_ONCE, Decoder, State
from megatron_blackmamba.inference.draft import Guessing, why_no_draft
from megatron_blackmamba.inference.sampling import GenerationError, Sampler, Sampling
from megatron_blackmamba.inference.text import Piece, Text
from megatron_blackmamba.inference.weights import fitting_dtype, pack
from megatron_blackmamba.interchange.canonical import tokenizer_of
from megatron_blackmamba.interchange.open import open_model
from megatron_blackmamba.tokenizer import Tokenizer


@dataclass
class Generator:
    """A model with its tokenizer.

    >>> model = load("exports/blackmamba")
    >>> model.generate("The state of a recurrent model", max_new_tokens=40)
    """

    decoder: Decoder
    tokenizer: Tokenizer | None = None
    draft: bool = False
    """Whether one text is drafted by the model's extra depth (model.mtp)."""
    longest: int = sys.maxsize
    """Tokens of a prompt given as text; a longer one is cut on the left."""

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = Sampling(),
        stop: Sequence[str] = (),
    ) -> str:
        """Return the continuation of the prompt."""
        return "".join(self.stream(prompt, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop))

    def stream(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = Sampling(),
        stop: Sequence[str] = (),
    ) -> Iterator[str]:
        """Return an iterator over the pieces of the continuation, each as soon as its characters are complete."""
        pieces = self.pieces([prompt], max_new_tokens=max_new_tokens, sampling=sampling, stop=stop)
        return (piece.text for piece in pieces)

    def generate_batch(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = Sampling(),
        samples: int = 1,
        stop: Sequence[str] = (),
    ) -> list[str]:
        """Return the continuations of all prompts, equal to generating them one by one.

        The `samples` texts of one prompt are adjacent.
        """
        texts = [""] * (len(prompts) * samples)
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "samples": samples}
        for piece in self.pieces(prompts, **options, stop=stop):
            texts[piece.row] += piece.text
        return texts

    def pieces(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = Sampling(),
        samples: int = 1,
        stop: Sequence[str] = (),
    ) -> Iterator[Piece]:
        """Yield the texts of all rows as they are generated; each row's last piece says why it ended.

        stop: a text that holds one of these ends before it.
        """
        if max_new_tokens < 0:
            raise GenerationError(f"max_new_tokens must be 0 or more, not {max_new_tokens}")
        if not all(stop):
            raise GenerationError("an empty stop string: leave it out")
        encoded = [self._encode(prompt) for prompt in prompts]
        texts = [Text(self._tokenizer(), stop, prompt) for prompt in encoded for _ in range(samples)]
        running = [True] * len(texts)
        steps = self.tokens(encoded, max_new_tokens=max_new_tokens, sampling=sampling, samples=samples, running=running)
        for tokens in steps:
            for row, (text, token) in enumerate(zip(texts, tokens, strict=True)):
                if text.ended:
                    continue
                piece = text.rest() if token is None else text.add(token)
                running[row] = token is not None and not text.stopped
                text.ended = not running[row]
                if piece or text.ended:
                    yield Piece(row, piece, "stop" if text.ended else None)
        for row, text in enumerate(texts):
            if not text.ended:
                yield Piece(row, text.rest(), "stop" if text.stopped or not running[row] else "length")

    def tokens(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = Sampling(),
        samples: int = 1,
        stop: int | None = None,
        running: list[bool] | None = None,
    ) -> Iterator[list[int | None]]:
        """Yield the next token of each row, step by step, until all rows have ended; None for a row that has ended.

        A row is one sample of one prompt; the samples of a prompt are adjacent.

        Args:
            stop: Token id that ends a row. Default: the tokenizer's end of document.
            running: One flag per row. The caller may set it to False between steps to end the row.
        """
        if samples < 1:
            raise GenerationError(f"samples must be 1 or more, not {samples}")
        if stop is None and self.tokenizer is not None:
            stop = self.tokenizer.eod_id
        if max_new_tokens < 1 or not prompts:
            return
        self.check(prompts)
        step, logits_BV = self._begun(prompts, samples)
        prompts = [prompt for prompt in prompts for _ in range(samples)]
        sampler = Sampler(sampling, prompts, logits_BV.shape[-1], logits_BV.device)
        running = [True] * len(prompts) if running is None else running
        likeliest_B = None
        for n in range(max_new_tokens):
            tokens_B = sampler(logits_BV, likeliest_B)
            tokens = tokens_B.tolist()
            running[:] = [goes_on and token != stop for goes_on, token in zip(running, tokens, strict=True)]
            if not any(running):
                return
            yield [token if goes_on else None for goes_on, token in zip(running, tokens, strict=True)]
            if n + 1 < max_new_tokens:
                logits_BV, likeliest_B = step(tokens_B), likeliest(step)

    def _begun(self, prompts: Sequence[Sequence[int]], samples: int) -> tuple[Step, Tensor]:
        """Read the prompts; return the function for each further token, and the logits of the first."""
        if self.draft and len(prompts) * samples == 1:
            guessing = Guessing(self.decoder, prompts[0])
            return guessing, guessing.logits_1V
        state = self.decoder.start(len(prompts))
        logits_BV = self._read(state, prompts)
        if samples > 1:  # a prompt is read once for all its samples
            rows = torch.arange(len(prompts), device=logits_BV.device).repeat_interleave(samples)
            state, logits_BV = state.rows(rows), logits_BV[rows]
        return stepper(self.decoder, state), logits_BV

    def check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Refuse an empty prompt, and token ids that the model does not have."""
        vocabulary = self.decoder.weights.embedding_VD.shape[0]
        for number, prompt in enumerate(prompts, 1):
            if not prompt:
                raise GenerationError("an empty prompt: give at least one token, such as the end-of-document token")
            wrong = next((place for place, token in enumerate(prompt) if not 0 <= token < vocabulary), None)
            if wrong is not None:
                raise GenerationError(
                    f"token id {prompt[wrong]} of prompt {number} (position {wrong}): the model knows 0 to "
                    f"{vocabulary - 1}. Use the tokenizer that it was trained with"
                )

    def _read(self, state: State, prompts: Sequence[Sequence[int]]) -> Tensor:
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
        if not isinstance(prompt, str):
            raise GenerationError(
                f"a prompt is a text, not {prompt!r}. Give several to `generate_batch`, and token ids to `tokens`"
            )
        tokenizer = self._tokenizer()
        return tokenizer.encode(prompt)[-self.longest :] or [tokenizer.eod_id]

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise GenerationError(
                "the model has no tokenizer: name one with --tokenizer FILE. In Python: load(..., tokenizer=FILE), or"
                " give token ids to `Generator.tokens`"
            )
        return self.tokenizer


def load(
    model: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    tokenizer: str | Path | None = None,
    ema: bool = False,
    draft: bool = False,
) -> Generator:
    """Load a model of any kind: one of our checkpoints or runs, a Hugging Face export, or the released files.

    dtype: of the large matrices; by default as stored, or fp32 for fp16; bf16 where fp32 would fill the memory.
    ema: take the averaged weights of a checkpoint (training.ema).
    draft: let the extra depth of a checkpoint (model.mtp) guess tokens of a single text, which stays the same.
    """
    if not isinstance(dtype, (torch.dtype, NoneType)):
        raise GenerationError(f"dtype must be a torch.dtype such as torch.bfloat16, not {dtype!r}")
    where = usable_device(device)
    source = open_model(Path(model), None if tokenizer is None else Path(tokenizer), ema=ema)
    text = tokenizer_of(source)
    weights = pack(source, dtype or fitting_dtype(source, where), where)
    if draft and (reason := why_no_draft(weights)):
        raise GenerationError(f"{model}: {reason}. Leave out --draft")
    return Generator(Decoder(weights), text, draft)


def usable_device(wanted: str | torch.device | None) -> torch.device:
    """Return the device to run on, by default CUDA if available, or refuse a missing one."""
    try:
        where = torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        where = None
    if where is None or where.type not in ("cpu", "cuda"):
        raise GenerationError(f"device must be cpu, cuda or cuda:1, not {str(wanted)!r}")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise GenerationError("PyTorch finds no GPU here. Use `cpu`, or run `blackmamba doctor`.")
    return where
