"""The first stages of deduplication: repeated lines, and for every document its MinHash, rank and sketch."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.utils.hashing import HashConfig

from megatron_blackmamba.data_tools.cleaning import Cleaning
from megatron_blackmamba.data_tools.options import DedupOptions
from megatron_blackmamba.data_tools.shingles import Shingler, line_keys
from megatron_blackmamba.data_tools.sorted_runs import (
    files_of,
    read_range,
    read_records,
    share,
    write_records,
    write_run,
)
from megatron_blackmamba.data_tools.sources import Preferences
from megatron_blackmamba.formats import atomic

LONGEST_SKETCH = 1024
"""The number of a document's smallest shingles that are stored: similarities of shorter documents are exact."""
BLOCK = 1 << 15
"""Documents whose signatures are held in memory before they are written as a run."""
_SHINGLES_AT_ONCE = 128
"""N-grams hashed in one piece, which stays in the cache of a core."""
_PRIME = np.uint64((1 << 61) - 1)
_LINES_AT_ONCE = 1 << 20

LINE = np.dtype([("key", "<u8"), ("documents", "<u4")])
BAND = np.dtype([("key", "<u8"), ("id", "<u8"), ("size", "<u4"), ("tie", "<u4")])
"""A group of MinHashes as `key`, the document, the number of its shingles, and a part of their hash."""
CONTENT = np.dtype([("key", "<u8"), ("rest", "<u8"), ("rank", "<u8"), ("tie", "<u8"), ("id", "<u8")])
"""The hash of all shingles as `key` and `rest`; the rank, of which the higher is the better copy; the document."""


def document_type(hashes: int) -> np.dtype:
    """Return the type of a document's row: rank, origin, sketch, and one bit of each MinHash."""
    numbers = [("rank", "<u8"), ("tie", "<u8"), ("record", "<u8"), ("start", "<u8"), ("source", "<u4"), ("size", "<u4")]
    return np.dtype([*numbers, ("bits", "u1", (-(-hashes // 8),))])


def ids(part: int, documents: Any) -> Any:
    """Return the ids of documents of a part, which sort by part."""
    return np.uint64(part << 32) + np.asarray(documents, np.uint64)


class MinHash(MinhashDedupSignature):
    """datatrove's MinHash in less time and bounded memory.

    A repeated n-gram cannot change a minimum, so distinct ones are hashed, in pieces, and without a division.
    """

    def get_signature(self, shingles: np.ndarray) -> Any:
        return self.smallest(np.unique(shingles)).reshape(self.config.num_buckets, -1).tolist()

    def smallest(self, distinct: np.ndarray) -> np.ndarray:
        """Return the smallest hashes of distinct shingles, one of each hash function."""
        a, b = self.parameters
        rows = distinct.astype(np.uint64).reshape(-1, 1)
        smallest = np.full(self.num_hashes, self.config.hash_config.max, np.uint64)
        for first in range(0, len(rows), _SHINGLES_AT_ONCE):
            hashes = modulo_prime(rows[first : first + _SHINGLES_AT_ONCE] * a + b)
            hashes &= np.uint64(self.config.hash_config.max)
            np.minimum(smallest, hashes.min(axis=0), out=smallest)
        return smallest


def modulo_prime(values: np.ndarray) -> np.ndarray:
    """Return `values` modulo 2^61 - 1; values: any uint64, overwritten."""
    high = values >> np.uint64(61)
    values &= _PRIME
    values += high
    return np.subtract(values, _PRIME, out=values, where=values >= _PRIME)


class Store:
    """The intermediate files of a deduplication: which stage writes what, and where."""

    def __init__(self, work: Path, options: DedupOptions) -> None:
        self.work, self.options = work, options
        self.lines, self.repeated = work / "lines", work / "repeated"
        self.signatures, self.copies, self.pairs = work / "signatures", work / "copies", work / "pairs"
        self.edges, self.choice = work / "edges", work / "choice"
        self.document = document_type(options.buckets * options.hashes)

    @property
    def spent(self) -> list[Path]:
        """Return the folders that nothing reads once all is done."""
        return [self.lines, self.repeated, self.signatures, self.copies, self.pairs, self.edges, self.choice]

    def documents(self, part: int) -> np.ndarray:
        return read_records(self.signatures / f"{part:05d}.documents", self.document)

    def sketches(self, part: int) -> np.ndarray:
        return read_records(self.signatures / f"{part:05d}.sketches", np.dtype("<u4"))

    def counts(self, parts: int) -> np.ndarray:
        """Return the number of documents of each part."""
        sizes = [(self.signatures / f"{part:05d}.documents").stat().st_size for part in range(parts)]
        return np.array(sizes, np.int64) // self.document.itemsize


class Lines(PipelineStep):
    """The lines of a part and the number of its documents that hold each, as sorted runs."""

    type = "🫂 - DEDUP"
    name = "lines"

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def run(self, data: Any, rank: int, world_size: int) -> None:
        keys: list[int] = []
        runs = 0
        for document in data:
            keys.extend(line_keys(document.text))
            if len(keys) >= _LINES_AT_ONCE:
                self._write(rank, runs, keys)
                keys, runs = [], runs + 1
        self._write(rank, runs, keys)

    def _write(self, rank: int, run: int, keys: list[int]) -> None:
        values, counts = np.unique(np.array(keys, np.uint64), return_counts=True)
        records = np.empty(len(values), LINE)
        records["key"], records["documents"] = values, counts
        write_run(self.store.lines / f"{rank:05d}.{run:04d}", records)


class RepeatedLines(PipelineStep):
    """The lines of a range of hashes that at least --boilerplate documents hold."""

    type = "🫂 - DEDUP"
    name = "repeated lines"

    def __init__(self, store: Store, at_least: int) -> None:
        super().__init__()
        self.store, self.at_least = store, at_least

    def run(self, data: Any, rank: int, world_size: int) -> None:
        lines = read_range(files_of(self.store.lines), LINE, *share(rank, world_size))
        values, places = np.unique(lines["key"], return_inverse=True)
        documents = np.bincount(places, weights=lines["documents"], minlength=len(values))
        write_records(self.store.repeated / f"{rank:05d}", values[documents >= self.at_least])


class Signatures(PipelineStep):
    """MinHash groups as sorted runs; and for every document its rank, its origin and its sketch."""

    type = "🫂 - DEDUP"
    name = "signatures"

    def __init__(self, cleaning: Cleaning, store: Store, words: Any) -> None:
        super().__init__()
        self.cleaning, self.store, self.words = cleaning, store, words

    def run(self, data: Any, rank: int, world_size: int) -> None:
        options, folder = self.store.options, self.store.signatures
        repeated = None
        if options.boilerplate:
            u64 = np.dtype("<u8")
            repeated = np.concatenate([read_records(path, u64) for path in files_of(self.store.repeated)])
        shingler = Shingler(options.n_grams, self.words, repeated)
        config = MinhashConfig(options.n_grams, options.buckets, options.hashes, hash_config=HashConfig(precision=32))
        minhash = MinHash(str(folder), config, self.words)
        sources = {source.name: place for place, source in enumerate(self.cleaning.parts[rank])}
        preferences = Preferences(options.prefer)
        start = number = 0
        with (
            atomic.atomic_file(folder / f"{rank:05d}.documents") as rows,
            atomic.atomic_file(folder / f"{rank:05d}.sketches") as sketches,
        ):
            while True:
                made = _Block(minhash, self.store.document)
                for document in islice(data, BLOCK):
                    shingles = shingler(document.text)
                    sketch = shingles[:LONGEST_SKETCH]
                    where = document.metadata
                    made.add(shingles, document.text, start, sources[where["file"]], where, preferences)
                    sketches.write(sketch.tobytes())
                    start += len(sketch)
                if not made.count:
                    break
                rows.write(made.rows[: made.count].tobytes())
                made.write(folder / f"{rank:05d}.{number // BLOCK:04d}", ids(rank, number + np.arange(made.count)))
                number += made.count


class _Block:
    """The signatures of some documents of a part."""

    def __init__(self, minhash: MinHash, document: np.dtype) -> None:
        self.minhash, self.count = minhash, 0
        self.rows = np.zeros(BLOCK, document)
        self.contents = np.zeros(BLOCK, CONTENT)
        self.keys = np.zeros((BLOCK, minhash.config.num_buckets), np.uint64)
        odd = np.random.RandomState(7).randint(0, 1 << 63, size=minhash.config.hashes_per_bucket, dtype=np.uint64)
        self.factors = odd << np.uint64(1) | np.uint64(1)

    def add(
        self, shingles: np.ndarray, text: str, start: int, source: int, where: dict[str, Any], preferences: Preferences
    ) -> None:
        row, content = self.rows[self.count], self.contents[self.count]
        rank = min(len(text), 0xFFFFFFFF) << 32 | preferences.rank(where["file"]) << 16
        place = xxhash.xxh32_intdigest(f"{where['file']}:{where['record']}")
        tie = xxhash.xxh32_intdigest(text) << 32 | place
        for record in (row, content):
            record["rank"], record["tie"] = rank, tie
        row["record"], row["start"], row["source"], row["size"] = where["record"], start, source, len(shingles)
        if len(shingles):
            smallest = self.minhash.smallest(shingles)
            row["bits"] = np.packbits((smallest & np.uint64(1)).astype(bool))
            groups = smallest.reshape(self.minhash.config.num_buckets, -1)
            self.keys[self.count] = (groups * self.factors).sum(axis=1, dtype=np.uint64)
            digest = xxhash.xxh128_intdigest(shingles.tobytes())
            content["key"], content["rest"] = digest >> 64, digest & 0xFFFFFFFFFFFFFFFF
        self.count += 1

    def write(self, path: Path, numbers: np.ndarray) -> None:
        """Write the runs: <path>.contents, and <path>.bands with one run after another."""
        contents, rows, keys = self.contents[: self.count], self.rows[: self.count], self.keys[: self.count]
        contents["id"] = numbers
        shingled = rows["size"] > 0
        write_run(path.with_name(path.name + ".contents"), contents[shingled])
        keys = mixed(keys[shingled])
        bands = np.empty((keys.shape[1], len(keys)), BAND)
        bands["id"], bands["size"] = numbers[shingled], rows["size"][shingled]
        bands["tie"] = contents["rest"][shingled].astype(np.uint32)
        for band, some in enumerate(bands):
            some["key"] = keys[:, band]
            some[:] = some[np.argsort(some["key"], kind="stable")]
        write_records(path.with_name(path.name + ".bands"), bands)


def mixed(keys: np.ndarray) -> np.ndarray:
    """Return keys spread evenly over 64 bits, so that equal ranges hold about as many."""
    keys = (keys ^ (keys >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    return keys ^ (keys >> np.uint64(32))
