"""A model that scores: its tokenizer, its precision, and the processes that read with it."""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Protocol

import torch

from megatron_blackmamba.evaluation.errors import EvaluationError
from megatron_blackmamba.evaluation.scoring import Batch, Score, make_item, plan
from megatron_blackmamba.evaluation.workers import Here, Load, Pool, default_processes
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.generator import usable_device
from megatron_blackmamba.inference.weights import fitting_dtype
from megatron_blackmamba.interchange.canonical import tokenizer_of
from megatron_blackmamba.interchange.open import open_model

BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
Pair = tuple[Sequence[int], Sequence[int]]
"""The tokens of a context, and those of its continuation."""


class Watcher(Protocol):
    """A recorder of scores that can also return the scores of an earlier call."""

    def known(self, batches: Sequence[Batch]) -> list[Score]:
        """Return scores of an earlier call for the same batches."""
        ...

    def done(self, batch: Batch, scores: list[Score]) -> None:
        """Record the scores of a batch."""
        ...


class ScoredModel:
    """A model of any kind that `blackmamba generate` reads, scored through its recurrent state."""

    def __init__(
        self,
        path: Path,
        *,
        dtype: torch.dtype | None = None,
        device: str | None = None,
        tokenizer: Path | None = None,
        nproc: int | None = None,
        batch_tokens: int | None = None,
        max_length: int | None = None,
        ema: bool = False,
    ):
        self.watcher: Watcher | None = None
        source = open_model(path, tokenizer, ema=ema)
        text = tokenizer_of(source)
        if text is None:
            raise EvaluationError(f"{path}: this model has no tokenizer. Name one with --tokenizer FILE")
        self.text = text
        self.max_length = max_length or source.sequence_length
        where = usable_device(device)
        self.dtype = dtype or fitting_dtype(source, where)
        self.batch_tokens = batch_tokens or BATCH_TOKENS[where.type]
        self._load = Load(path, self.dtype, tokenizer, ema)
        self._place = device
        processes = nproc or default_processes(device)
        self.scorer: Here | Pool = Here(lambda: self.decoder)
        if processes > 1:
            self.scorer = Pool(self._load, processes, device)

    @cached_property
    def decoder(self) -> Decoder:
        """Return the model in this process."""
        return self._load(self._place)

    def scores(self, pairs: Sequence[Pair], longest: int | None = None) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding writes it.

        longest: tokens of context and continuation; longer ones are cut on the left. By default the model's length.
        """
        items = [make_item(i, context, rest, longest or self.max_length) for i, (context, rest) in enumerate(pairs)]
        batches = plan([item for item in items if item.scored], self.batch_tokens)
        found = {item.index: (0.0, True) for item in items if not item.scored}  # an empty continuation is certain

        def note(scores: list[Score]) -> None:
            found.update({score.item: (score.log_likelihood, score.greedy) for score in scores})

        def done(batch: Batch, scores: list[Score]) -> None:
            note(scores)
            if self.watcher:
                self.watcher.done(batch, scores)

        if self.watcher:
            note(self.watcher.known(batches))
        left = [b for b in batches if any(item.index not in found for group in b for item in group.items)]
        self.scorer.score_all(left, self.batch_tokens, done)
        return [found[i] for i in range(len(items))]

    def totals(self, windows: Sequence[Sequence[Pair]], longest: int | None = None) -> list[float]:
        """Return the log-likelihood of each text, whose tokens are the continuations of its windows."""
        owners = [number for number, of_text in enumerate(windows) for _ in of_text]
        found = [0.0] * len(windows)
        for owner, (log_likelihood, _) in zip(owners, self.scores([*chain(*windows)], longest), strict=True):
            found[owner] += log_likelihood
        return found

    def close(self) -> None:
        """Stop the scoring processes."""
        self.scorer.close()
