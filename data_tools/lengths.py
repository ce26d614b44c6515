"""Lengths of the documents of token shards, by source."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_blackmamba.formats.find_shards import find_shards
from megatron_blackmamba.formats.mixture import Mixture
from megatron_blackmamba.formats.shards import Idx

QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
_BAR = 40


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
    for path in paths:
        if path.endswith((".yaml", ".yml")):
            mixture = Mixture.read(path)
            for name, (training, _) in mixture.open_all().items():
                groups.setdefault(name, []).extend(_lengths(shard.idx) for shard in training)
        else:
            for shard in find_shards(path):
                groups.setdefault(str(Path(shard.prefix).parent), []).append(_lengths(shard.idx))
    return [_measured(name, np.concatenate(parts)) for name, parts in groups.items()]


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
