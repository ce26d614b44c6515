"""Local text as a task: nats per token and bits per byte, each document read in overlapping windows."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

from megatron_blackmamba.data_tools.batches import ReadOptions
from megatron_blackmamba.data_tools.readers import Reader
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.sources import find_sources
from megatron_blackmamba.evaluation.errors import EvaluationError
from megatron_blackmamba.evaluation.model import Pair, ScoredModel
from megatron_blackmamba.formats.evaluations import ScoringKey, TaskResult
from megatron_blackmamba.formats.remote import file_sha256
from megatron_blackmamba.tokenizer import Tokenizer

AT_ONCE = 1024
"""Documents encoded in one call."""


@dataclass(frozen=True)
class TextFile:
    """A file of documents to score, in any format that `blackmamba data` reads."""

    file: Path
    title: str
    context: int | None
    """Tokens before a token that the model sees; None: as many as in training."""

    version = "1"

    @property
    def name(self) -> str:
        """Return the name among the tasks."""
        return f"text:{self.title}"

    @cached_property
    def sha256(self) -> str:
        """Return the hash of the file."""
        return file_sha256(self.file)

    def documents(self) -> Iterator[str]:
        """Yield the documents of the file; refuse a record that cannot be read."""
        (source,) = find_sources([str(self.file)]).sources

        def refuse(number: int, reason: str, detail: str) -> None:
            raise EvaluationError(f"{self.file}, record {number}: {reason}: {detail}. Correct it, or remove the record")

        for batch in Reader(source.path, source.format, ReadOptions(), refuse).batches():
            yield from (text for text in batch.texts if text)

    def measure(self, key: ScoringKey, model: ScoredModel, limit: int | None) -> TaskResult:
        """Return nats per token and bits per byte of the first `limit` documents."""
        texts = list(islice(self.documents(), limit))
        if not texts:
            raise EvaluationError(f"{self.file}: has no document")
        sizes = [len(text.encode()) for text in texts]
        cut = [[*windows(document, key.max_length)] for document in encoded(texts, model.text)]
        nats = [-total for total in model.totals(cut, key.max_length)]
        counts = [sum(len(new) for _, new in of_text) for of_text in cut]
        total, tokens = sum(sizes), sum(counts)
        metrics = {"bits_per_byte": sum(nats) / math.log(2) / total, "nats_per_token": sum(nats) / tokens}
        # a document's bits over the mean bytes of a document: their mean is the bits per byte of all
        answers = [of_one / math.log(2) * len(texts) / total for of_one in nats]
        over = {"bits_per_byte": sizes, "nats_per_token": counts}
        errors = {name: metrics[name] * _relative_error(nats, of) for name, of in over.items() if len(texts) > 1}
        return TaskResult(
            key=key,
            metrics=metrics,
            errors=errors,
            questions=len(texts),
            answers={"bits_per_byte": answers},
            seconds=0.0,
            data_file=str(self.file),
            counts={"tokens": tokens, "bytes": total},
        )

    def longest(self, model: ScoredModel) -> int:
        """Return the tokens of a window."""
        return self.context or model.max_length


def text_files(names: Sequence[str | Path], context: int | None) -> list[TextFile]:
    """Return the files to score, by name, or by path where two have the same name."""
    files = [Path(name) for name in names]
    try:
        for file in files:
            if not file.is_file():
                raise EvaluationError(f"--text {file}: no such file (from {Path.cwd()})")
            find_sources([str(file)])
    except InputError as error:
        raise EvaluationError(f"--text {error}") from None
    several = {file.name for file in files if sum(other.name == file.name for other in files) > 1}
    return [TextFile(file, str(file) if file.name in several else file.name, context) for file in files]


def encoded(texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the tokens of each document between two end-of-document tokens, as it is in training."""
    for start in range(0, len(texts), AT_ONCE):
        ids, lengths = tokenizer.encode_batch(texts[start : start + AT_ONCE])
        first = 0
        for length in lengths.tolist():
            yield [tokenizer.eod_id, *ids[first : first + length].tolist(), tokenizer.eod_id]
            first += length


def windows(tokens: Sequence[int], context: int) -> Iterator[Pair]:
    """Yield context and continuation, so that every token but the first is in one continuation.

    A window has `context` tokens before its last one. Each moves on by half a window; only its new tokens are scored.
    """
    yield tokens[:1], tokens[1 : context + 1]
    done, step = context + 1, max(1, context // 2)
    while done < len(tokens):
        end = min(done + step, len(tokens))
        yield tokens[end - 1 - context : done], tokens[done:end]
        done = end


def _relative_error(parts: Sequence[float], sizes: Sequence[int]) -> float:
    """Return the standard error of the ratio of two sums over documents, as a part of the ratio."""
    ratio, n = sum(parts) / sum(sizes), len(parts)
    squares = sum((part - ratio * size) ** 2 for part, size in zip(parts, sizes, strict=True))
    return math.sqrt(squares * n / (n - 1)) / sum(parts)
