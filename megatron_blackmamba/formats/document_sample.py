"""A sample of a shard's documents by hashes of their token ids: finds documents that two shards share.

The raw files may differ: one shard may come from Parquet, the other from JSON Lines. Every shard keeps the documents
with the smallest hashes, so shards that share documents sample the same ones.
"""

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

VERSION: Literal[1] = 1
SIZE = 2048
"""Documents in a sample. A shard with fewer lists all of them."""
LARGEST = (1 << 64) - 1
_PENDING = SIZE // 4
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64)
_HIGH_HALF = np.uint64(0xFFFFFFFF00000000)
_32 = np.uint64(32)


class DocumentSample(BaseModel):
    """The documents of a shard with the smallest hashes, as its manifest has them."""

    model_config = ConfigDict(extra="ignore")  # another version may say more, and is not compared

    version: int = VERSION
    hashes: str = ""
    """Base64 of little-endian uint64, ascending, each once."""
    numbers: str = ""
    """Base64 of little-endian uint32: the number of each document in the order in which the shard was read."""

    def decode(self) -> "Sampled | None":
        """Return the arrays, or None for a version that this one does not know."""
        if self.version != VERSION:
            return None
        hashes = np.frombuffer(base64.b64decode(self.hashes), "<u8")
        return Sampled(hashes, np.frombuffer(base64.b64decode(self.numbers), "<u4"))


@dataclass(frozen=True)
class Sampled:
    """Hashes, ascending, and the number of each document."""

    hashes: np.ndarray
    numbers: np.ndarray

    @property
    def last(self) -> int:
        """Return the hash up to which all documents of the shard are listed."""
        return int(self.hashes[-1]) if len(self.hashes) >= SIZE else LARGEST


class DocumentSampler:
    """Collects the sample while a shard is written."""

    def __init__(self) -> None:
        self._hashes, self._numbers = np.empty(0, np.uint64), np.empty(0, np.uint32)
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._waiting = 0
        self._documents = 0
        self._limit = np.uint64(LARGEST)

    def add(self, ids: np.ndarray, lengths: np.ndarray, numbers: np.ndarray | None = None) -> None:
        """Look at the next documents. `ids` are theirs back to back, without EOD, and no document is empty.

        numbers: of these documents; by default they follow the last ones.
        """
        keys = document_keys(ids, lengths)
        chosen = np.flatnonzero(keys <= self._limit)
        if len(chosen) > SIZE:  # a CRC costs more than all else here: none for documents that cannot be in the sample
            smallest = np.unique(upper_half(keys[chosen]))[:SIZE]
            chosen = chosen[keys[chosen] <= smallest[-1] | ~_HIGH_HALF] if len(smallest) == SIZE else chosen
        if len(chosen):
            hashes = document_hashes(ids, lengths, keys, chosen)
            of_chosen = self._documents + chosen if numbers is None else numbers[chosen]
            self._pending.append((hashes, of_chosen.astype(np.uint32)))
            self._waiting += len(chosen)
            if self._waiting > _PENDING:
                self._reduce()
        self._documents += len(lengths)

    def sample(self) -> DocumentSample:
        self._reduce()
        hashes, numbers = self._hashes.astype("<u8").tobytes(), self._numbers.astype("<u4").tobytes()
        return DocumentSample(hashes=base64.b64encode(hashes).decode(), numbers=base64.b64encode(numbers).decode())

    def _reduce(self) -> None:
        hashes = np.concatenate([self._hashes, *(hashes for hashes, _ in self._pending)])
        numbers = np.concatenate([self._numbers, *(numbers for _, numbers in self._pending)])
        self._hashes, first = np.unique(hashes, return_index=True)
        self._hashes, self._numbers = self._hashes[:SIZE], numbers[first[:SIZE]]
        self._pending, self._waiting = [], 0
        if len(self._hashes) == SIZE:
            self._limit = self._hashes[-1] | ~_HIGH_HALF


def document_keys(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return a hash of the length and three tokens of each document; its upper half decides what is sampled."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    keys = lengths.astype(np.uint64) * _FACTORS[0]
    for factor, places in zip(_FACTORS[1:], (starts, starts + (lengths >> 1), ends - 1), strict=True):
        keys += ids[places] * factor
    keys ^= keys >> _32
    keys *= _FACTORS[0]
    keys ^= keys >> _32
    keys *= _FACTORS[1]
    return keys


def document_hashes(ids: np.ndarray, lengths: np.ndarray, keys: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return 64 bits for each chosen document: the upper half of its key, and the CRC of all its tokens."""
    tokens = np.ascontiguousarray(ids, "<u4").data.cast("B")
    ends = np.cumsum(lengths, dtype=np.int64)[chosen] * 4
    starts = ends - lengths[chosen] * 4
    crc = zlib.crc32
    low = [crc(tokens[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    return upper_half(keys[chosen]) | np.array(low, np.uint64)


def upper_half(hashes: np.ndarray) -> np.ndarray:
    """Return hashes without the CRC, so that they compare with keys."""
    return hashes & _HIGH_HALF


FEWEST_FOUND = 3
"""Fewer documents found in samples do not count: they may be short texts that occur everywhere."""
_DEVIATIONS = 3
"""Standard deviations by which a number of documents found in samples must exceed the expected one."""


@dataclass(frozen=True)
class Overlap:
    """Documents of a held-out set that are in training shards too."""

    found: int
    compared: int
    """Distinct documents of the held-out set that could be compared."""
    hashes: np.ndarray
    """Of those that were found."""

    @property
    def share(self) -> float:
        return self.found / self.compared


class TrainingSamples:
    """The samples of all training shards together: sorted once, searched for each held-out set."""

    def __init__(self, samples: Sequence[Sampled]) -> None:
        self._hashes = np.sort(np.concatenate([np.empty(0, np.uint64), *(sampled.hashes for sampled in samples)]))
        self._limits = np.unique(np.array([sampled.last for sampled in samples], np.uint64))

    def overlap(self, held_out: Sequence[Sampled], most: float = 0.0) -> Overlap | None:
        """Return the overlap at the sampling rate where it is largest, or None if at none it is more than `most`.

        A shard lists its documents up to a largest hash. For each of these limits, all training shards are compared.
        Samples show an overlap of more than `most` if that share explains the number found with probability below 1%.
        """
        if not len(self._hashes) or not held_out:
            return None
        wanted = np.unique(np.concatenate([sampled.hashes for sampled in held_out]))
        hits = is_among(wanted, self._hashes)
        compared = np.searchsorted(wanted, self._limits, side="right")
        found = np.concatenate([[0], np.cumsum(hits)])[compared]
        complete = self._limits[0] == LARGEST and all(sampled.last == LARGEST for sampled in held_out)
        chance = 0 if complete else _DEVIATIONS * np.sqrt(most * (1 - most) * compared)
        counts = (found >= (1 if complete else FEWEST_FOUND)) & (found > most * compared + chance)
        if not counts.any():
            return None
        shares = np.where(counts, found / np.maximum(compared, 1), 0)
        best = int(np.argmax(shares))
        inside = wanted[: compared[best]]
        return Overlap(int(found[best]), int(compared[best]), inside[hits[: compared[best]]])


def is_among(wanted: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    """Return which of the wanted hashes are in an ascending array; `np.isin` takes seconds for millions."""
    if not len(ascending):
        return np.zeros(len(wanted), bool)
    places = np.minimum(np.searchsorted(ascending, wanted), len(ascending) - 1)
    return ascending[places] == wanted
