"""Documents in random order, in bounded memory, the same order whatever that bound is.

Every document draws a 64-bit key from (seed, shard, its number); the order is that of the keys. Documents are thrown
into bucket files by the leading bits of their keys as they come, and each bucket is then put in order on its own.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

BUCKET_BYTES = 128 << 20
MOST_BUCKETS = 256
_WRITE_BYTES = 8 << 20
_SHORT_BYTES = 400
"""Mean size below which documents count as short."""
_GATHERED_AT_ONCE = 4096
"""Short documents gathered with one index, which stays in the cache."""
_MASK = (1 << 64) - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)


def order_keys(seed: int, shard: int, first: int, count: int) -> np.ndarray:
    """Return keys of documents `first` to `first + count`: splitmix64 over a stream chosen by seed and shard.

    No two documents have the same key, since every step can be undone: any way of sorting gives the same order.
    """
    stream = _mixed(_mixed(np.array([seed & _MASK], np.uint64)) ^ np.uint64(shard))
    return _mixed(stream + np.arange(first, first + count, dtype=np.uint64) * _STEP)


def document_order(seed: int, shard: int, count: int) -> np.ndarray:
    """Return the document at each place of a shuffled shard, as its number in reading order."""
    return np.argsort(order_keys(seed, shard, 0, count))


class DocumentShuffler:
    """A shuffler that takes documents in reading order and returns them in the order of their keys."""

    def __init__(self, folder: Path, expected_bytes: int) -> None:
        buckets = 1
        while buckets < MOST_BUCKETS and buckets * BUCKET_BYTES < expected_bytes:
            buckets *= 2
        self._shift = np.uint64(65 - buckets.bit_length())  # leaves log2(buckets) bits
        self._buckets = [_Bucket(folder / f"bucket_{i:03d}") for i in range(buckets)]

    def __enter__(self) -> "DocumentShuffler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for bucket in self._buckets:
            bucket.remove()

    def add(self, tokens: np.ndarray, lengths: np.ndarray, keys: np.ndarray) -> None:
        """Add documents, which are adjacent in `tokens`."""
        data = tokens.data.cast("B")
        ends = np.cumsum(lengths) * tokens.itemsize
        starts = ends - lengths * tokens.itemsize
        if len(self._buckets) == 1:
            self._buckets[0].add([data], lengths, keys)
            return
        places = keys >> self._shift
        order = np.argsort(places, kind="stable")
        borders = np.searchsorted(places[order], np.arange(len(self._buckets) + 1, dtype=np.uint64))
        for bucket, low, high in zip(self._buckets, borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            if low < high:
                chosen = order[low:high]
                sizes = ends[chosen] - starts[chosen]
                bucket.add([gathered(data, starts[chosen], sizes, tokens.itemsize)], lengths[chosen], keys[chosen])

    def drain(self, itemsize: int) -> Iterator[tuple[bytes | memoryview, np.ndarray]]:
        """Yield all documents in shuffled order: chunks of their bytes, and their lengths."""
        for bucket in self._buckets:
            yield from bucket.drain(itemsize)
            bucket.remove()


def gathered(data: memoryview, starts: np.ndarray, sizes: np.ndarray, itemsize: int) -> bytes | memoryview:
    """Return pieces of `data` back to back. starts, sizes: in bytes, multiples of `itemsize`.

    Slices are fast for long pieces; for short ones an index for every token is.
    """
    if not len(sizes) or int(sizes.sum()) > _SHORT_BYTES * len(sizes):
        stops = (starts + sizes).tolist()
        return b"".join([data[b:e] for b, e in zip(starts.tolist(), stops, strict=True)])
    tokens = np.frombuffer(data, f"u{itemsize}")
    begins, lengths = starts // itemsize, sizes // itemsize
    together = np.empty(int(lengths.sum()), tokens.dtype)
    done = 0
    for first in range(0, len(lengths), _GATHERED_AT_ONCE):
        some = lengths[first : first + _GATHERED_AT_ONCE]
        here = begins[first : first + _GATHERED_AT_ONCE]
        places = np.repeat(here - (np.cumsum(some) - some), some)
        places += np.arange(len(places))
        # "clip" lets `take` write into `out` without a copy; no place is out of range.
        tokens.take(places, mode="clip", out=together[done : done + len(places)])
        done += len(places)
    return together.data


class _Bucket:
    """Documents whose keys begin with the same bits, in a file in the order they came."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO | None = None
        self.lengths: list[np.ndarray] = []
        self.keys: list[np.ndarray] = []

    def add(self, pieces: Sequence[bytes | memoryview], lengths: np.ndarray, keys: np.ndarray) -> None:
        if self.file is None:
            self.file = open(self.path, "wb", buffering=1 << 16)  # noqa: SIM115
        self.file.writelines(pieces)
        self.lengths.append(lengths.astype(np.int32))
        self.keys.append(keys)

    def drain(self, itemsize: int) -> Iterator[tuple[bytes | memoryview, np.ndarray]]:
        if self.file is None:
            return
        self.file.close()
        lengths = np.concatenate(self.lengths)
        order = np.argsort(np.concatenate(self.keys))
        starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * itemsize
        starts, lengths = starts[order], lengths[order]
        sizes = lengths.astype(np.int64) * itemsize
        data = np.memmap(self.path, mode="r", dtype=np.uint8).data
        # Written in chunks: a bucket that grew beyond its share costs disk reads, not memory.
        chunk_of = (np.cumsum(sizes) - 1) // _WRITE_BYTES
        borders = [0, *(np.flatnonzero(np.diff(chunk_of)) + 1).tolist(), len(order)]
        for low, high in itertools.pairwise(borders):
            yield gathered(data, starts[low:high], sizes[low:high], itemsize), lengths[low:high]

    def remove(self) -> None:
        if self.file is not None:
            self.file.close()
            self.path.unlink(missing_ok=True)
            self.file = None
            self.lengths, self.keys = [], []


def _mixed(z: np.ndarray) -> np.ndarray:
    """Return the number after each of these in the sequence of splitmix64."""
    z = z + _STEP
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
