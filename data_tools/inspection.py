"""Documents of token shards as text again, each with the raw record it came from; their lengths by source."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_blackmamba.data_tools.mixture import read_mixtures
from megatron_blackmamba.data_tools.provenance import Origin, origin
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.formats.find_shards import find_shards
from megatron_blackmamba.formats.shards import Idx, Shard, ShardError
from megatron_blackmamba.tokenizer import Tokenizer, load_tokenizer

QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
_BAR = 40


@dataclass(frozen=True)
class Document:
    """One document of a shard."""

    shard: Shard
    number: int
    ids: np.ndarray
    origin: Origin
    text: str


def read_documents(
    paths: Sequence[str],
    *,
    numbers: Sequence[int] = (),
    count: int = 3,
    seed: int | None = None,
    tokenizer: str | None = None,
) -> Iterator[Document]:
    """Read documents of one shard: the numbered ones, or the first `count`, or random ones if a seed is given.

    Documents are numbered from 0, through all shards given in turn.
    """
    shards = find_shards(*paths)
    total = sum(shard.manifest.documents for shard in shards)
    if not numbers and seed is None:
        numbers = range(min(count, total))
    elif not numbers:
        numbers = sorted(random.Random(seed).sample(range(total), min(count, total)))
    yield from documents_at(shards, numbers, tokenizer)


def documents_at(shards: Sequence[Shard], numbers: Sequence[int], tokenizer: str | None = None) -> Iterator[Document]:
    """Yield documents of some shards, numbered from 0 through all of them."""
    starts = np.cumsum([0, *(shard.manifest.documents for shard in shards)])
    total = int(starts[-1])
    loaded: dict[str, Tokenizer] = {}
    for number in numbers:
        if not 0 <= number < total:
            raise InputError(f"document {number}: there are {total}, numbered from 0 to {total - 1}")
        at = int(np.searchsorted(starts, number, side="right")) - 1
        shard, place = shards[at], number - int(starts[at])
        sha256 = shard.manifest.tokenizer_sha256
        if sha256 not in loaded:
            loaded[sha256] = tokenizer_of(shard, tokenizer)
        try:
            ids = shard.document(place)
            _, found = ids[-1], origin(shard.manifest, place)
        except ShardError:
            raise
        except (IndexError, ValueError):
            raise InputError(f"{shard.idx_path}: is damaged: `blackmamba data verify` says where") from None
        yield Document(shard, place, ids, found, text_of_ids(ids, loaded[sha256]))


def text_of_ids(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """Return token ids as text, without an EOD at their end."""
    return tokenizer.decode(ids[:-1] if len(ids) and ids[-1] == tokenizer.eod_id else ids)


def tokenizer_of(shard: Shard, given: str | None = None) -> Tokenizer:
    """Return the tokenizer of a shard: its tokenizer.json, or the given one if its fingerprint matches."""
    manifest = shard.manifest
    name: str | Path = given if given is not None else shard.prefix.parent / "tokenizer.json"
    if given is None and not Path(name).exists():
        raise InputError(f"{name}: missing; name the tokenizer of these shards ({manifest.tokenizer}) with --tokenizer")
    tokenizer = load_tokenizer(name, eod=manifest.eod_id)
    if tokenizer.sha256 != manifest.tokenizer_sha256:
        raise InputError(
            f"{name}: sha256 {tokenizer.sha256[:12]}, but {shard.prefix} was made with {manifest.tokenizer}, "
            f"sha256 {manifest.tokenizer_sha256[:12]}: another tokenizer would show different text"
        )
    return tokenizer


@dataclass(frozen=True)
class Lengths:
    """The lengths of the documents of a source, in tokens including EOD."""

    source: str
    counts: np.ndarray
    """Documents of length 2^i up to, not including, 2^(i + 1)."""
    documents: int
    tokens: int
    shortest: int
    longest: int
    quantiles: dict[float, int]

    @property
    def mean(self) -> float:
        return self.tokens / max(1, self.documents)

    def described(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        histogram = {str(2**i): int(count) for i, count in enumerate(self.counts) if count}
        quantiles = {f"{share:g}": length for share, length in self.quantiles.items()}
        known = {"source": self.source, "documents": self.documents, "tokens": self.tokens, "mean": self.mean}
        return {**known, "shortest": self.shortest, "longest": self.longest} | {
            "quantiles": quantiles,
            "histogram": histogram,
        }


def by_source(paths: Sequence[str]) -> list[Lengths]:
    """Return the lengths of every source of a mixture file, and of every folder of shards."""
    groups: dict[str, list[np.ndarray]] = {}
    mixtures = read_mixtures(paths)
    for path in paths:
        if path in mixtures:
            for name, (training, _) in mixtures[path].open_all().items():
                groups.setdefault(name, []).extend(_lengths(shard.idx) for shard in training)
        else:
            for shard in find_shards(path):
                groups.setdefault(str(Path(shard.prefix).parent), []).append(_lengths(shard.idx))
    return [_measured(name, np.concatenate(parts)) for name, parts in groups.items()]


def lengths_of(source: str, shards: Sequence[Shard]) -> Lengths:
    """Return the lengths of the documents of some shards."""
    return _measured(source, np.concatenate([_lengths(shard.idx) for shard in shards]))


def _lengths(idx: Idx) -> np.ndarray:
    """Return the tokens of every document."""
    ends = np.concatenate([[0], np.cumsum(idx.sequence_lengths, dtype=np.int64)])
    return np.diff(ends[idx.document_indices])


def _measured(name: str, lengths: np.ndarray) -> Lengths:
    known = lengths if len(lengths) else np.zeros(1, np.int64)
    quantiles = np.quantile(known, QUANTILES, method="nearest")
    return Lengths(
        source=name,
        counts=np.bincount(np.log2(lengths[lengths > 0]).astype(int)) if len(lengths) else np.zeros(0, int),
        documents=len(lengths),
        tokens=int(lengths.sum()),
        shortest=int(np.min(known)),
        longest=int(np.max(known)),
        quantiles={share: int(length) for share, length in zip(QUANTILES, quantiles, strict=True)},
    )


def histogram(lengths: Lengths) -> list[str]:
    """Return a source's lines: its numbers, and a bar for each power of two."""
    quantiles = ", ".join(f"{share:.0%} {length:,}" for share, length in lengths.quantiles.items())
    lines = [
        f"{lengths.source}: {lengths.documents:,} documents, {lengths.tokens:,} tokens",
        f"    mean {lengths.mean:,.1f}, shortest {lengths.shortest:,}, longest {lengths.longest:,}",
        f"    quantiles: {quantiles}",
    ]
    most = max(lengths.counts.tolist(), default=1)
    for power in np.flatnonzero(np.cumsum(lengths.counts) > 0):
        count = int(lengths.counts[power])
        bar = "#" * -(-_BAR * count // most)
        lines.append(f"    {2**power:>9,} to {2 ** (power + 1) - 1:>9,}  {count:>11,}  {bar}".rstrip())
    return lines
