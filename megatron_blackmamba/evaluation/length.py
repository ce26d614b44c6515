"""The loss by position: does a model go on improving as it reads on, or break beyond its training length?"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path

import torch
from torch import Tensor

from megatron_blackmamba.evaluation.errors import EvaluationError
from megatron_blackmamba.evaluation.journal import Journal
from megatron_blackmamba.evaluation.model import ScoredModel
from megatron_blackmamba.evaluation.retrieval import TIMES, Retrieval, doubling
from megatron_blackmamba.evaluation.scoring import token_nats
from megatron_blackmamba.evaluation.texts import TextFile, encoded, windows
from megatron_blackmamba.formats.evaluations import ScoringKey, TaskResult
from megatron_blackmamba.inference import Decoder

SEQUENCES = 16
FEWEST = 4
"""Long documents; if there are fewer, documents are joined."""
FIRST_BUCKET = 64
SUMS = ("tokens", "bytes", "nats", "window_nats")


@dataclass(frozen=True)
class LossByPosition:
    """Text read from one state up to a length, beside the same text read in windows as long as in training."""

    texts: tuple[TextFile, ...]
    length: int | None

    name = "length:loss"
    version = "1"

    @property
    def file(self) -> Path | None:
        """Return the file of the text, if it is one."""
        return self.texts[0].file if len(self.texts) == 1 else None

    @property
    def sha256(self) -> str:
        """Return a hash of all files."""
        return hashlib.sha256("".join(text.sha256 for text in self.texts).encode()).hexdigest()

    def longest(self, model: ScoredModel) -> int:
        """Return the positions of a sequence."""
        return self.length or TIMES * model.max_length

    def measure(self, key: ScoringKey, model: ScoredModel, limit: int | None) -> TaskResult:
        """Return the bits per byte of `limit` sequences in buckets of positions."""
        assert isinstance(model.watcher, Journal)
        length, journal = key.max_length, model.watcher
        sequences, joined = self._sequences(model, length, limit or SEQUENCES)
        parts: list[list[list[float]]] = list(journal.rows)
        journal.progress(len(parts) * length, len(sequences) * length)
        for tokens in sequences[len(parts) :]:
            parts.append(_of_sequence(tokens, model, length))
            journal.add(parts[-1], len(parts) * length, len(sequences) * length)
        sums = [[sum(column) for column in zip(*of_bucket, strict=True)] for of_bucket in zip(*parts, strict=True)]
        rows = [_row(bucket, of_bucket) for bucket, of_bucket in zip(buckets(length), sums, strict=True)]
        total = _row((0, length), [sum(column) for column in zip(*sums, strict=True)])
        counts = {"tokens": int(total["tokens"]), "bytes": int(total.get("bytes", 0)), "joined": int(joined)}
        metrics = {name: value for name, value in total.items() if "_per_" in name}
        return TaskResult(key, metrics, {}, len(parts), {}, 0.0, str(self.file) if self.file else None, counts, rows)

    def _sequences(self, model: ScoredModel, length: int, wanted: int) -> tuple[list[list[int]], bool]:
        """Return the beginnings of long documents, or of joined ones if too few are long; and which of the two."""
        long: list[list[int]] = []
        stream: list[int] = []
        for tokens in _in_turn([encoded([*text.documents()], model.text) for text in self.texts]):
            if len(tokens) > length + 1:
                long.append(tokens[: length + 1])
            if len(stream) <= wanted * length:
                stream += tokens[bool(stream) :]  # one end of document between two
            if len(long) == wanted:
                break
        if len(long) >= min(FEWEST, wanted):
            return long, False
        joined = [stream[at : at + length + 1] for at in range(0, len(stream) - length, length)][:wanted]
        if not joined:
            raise EvaluationError(
                f"--tasks length: the text has {len(stream):,} tokens, and --length is {length:,}. Name more --text, or"
                " a smaller --length"
            )
        return joined, True


def length_tasks(
    names: Sequence[str], texts: Sequence[TextFile], length: int | None
) -> Iterator[LossByPosition | Retrieval]:
    """Yield the tasks of this package by name."""
    for name in names:
        kind = name.partition(":")[2]
        if kind != "loss":
            yield Retrieval(kind, length)
        elif texts:
            yield LossByPosition(tuple(texts), length)
        else:
            raise EvaluationError(
                "--tasks length: the loss by position needs text. Name files with --text FILE, or leave it out:"
                " --tasks length:passkey,length:recall"
            )


def buckets(length: int) -> list[tuple[int, int]]:
    """Return where each bucket of positions begins and ends; each ends twice as far as the one before."""
    return [*pairwise([0, *doubling(FIRST_BUCKET, length)])]


def _in_turn(texts: Sequence[Iterator[list[int]]]) -> Iterator[list[int]]:
    """Yield a document of each text in turn, until all are read."""
    for documents in zip_longest(*texts):
        yield from (tokens for tokens in documents if tokens is not None)


def _of_sequence(tokens: list[int], model: ScoredModel, length: int) -> list[list[float]]:
    """Return the SUMS of each bucket."""
    nats_L = token_nats(model.decoder, torch.tensor([tokens]))[0]
    window_nats_L = in_windows(model.decoder, tokens, model.max_length, model.batch_tokens)
    bytes_V = model.text.token_bytes
    bytes_L = torch.zeros(length) if bytes_V is None else torch.from_numpy(bytes_V)[tokens[1:]]
    return [
        [last - first, *(float(each[first:last].sum()) for each in (bytes_L, nats_L, window_nats_L))]
        for first, last in buckets(length)
    ]


def in_windows(decoder: Decoder, tokens: list[int], context: int, batch_tokens: int) -> Tensor:
    """Return the nats of every token but the first, each seeing at most `context` tokens and at least half as many."""
    cut = [*windows(tokens, context)]
    windows_WC = torch.tensor([[*before, *new] for before, new in cut])  # all are as long as the first
    some = windows_WC.split(max(1, batch_tokens // (windows_WC.shape[1] - 1)))
    nats_WC = torch.cat([token_nats(decoder, part_WC) for part_WC in some])
    return torch.cat([nats_C[-len(new) :] for nats_C, (_, new) in zip(nats_WC, cut, strict=True)])


def _row(bucket: tuple[int, int], sums: Sequence[float]) -> dict[str, float]:
    """Return what a bucket says, in bits per byte if its bytes are known."""
    tokens, size, nats, window_nats = sums
    row = {"from": bucket[0], "to": bucket[1], "tokens": tokens}
    if size:
        bits = math.log(2) * size
        row |= {"bytes": size, "bits_per_byte": nats / bits, "window_bits_per_byte": window_nats / bits}
    return row | {"nats_per_token": nats / tokens, "window_nats_per_token": window_nats / tokens}
