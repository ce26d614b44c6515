"""The middle stages of deduplication: copies with equal shingles, pairs that MinHash proposes, and their similarity.

MinHash only proposes. Every pair is then compared by its sketches, and those of at least --similarity are kept.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from datatrove.pipeline.base import PipelineStep

from megatron_blackmamba.data_tools.shingles import jaccard
from megatron_blackmamba.data_tools.signatures import BAND, CONTENT, LONGEST_SKETCH, Store, ids
from megatron_blackmamba.data_tools.sorted_runs import between, files_of, read_range, read_records, share, write_run

WINDOW = 32
"""In a MinHash group, a document is compared with this many before it in the order of their numbers of shingles."""
HEADS = 8
"""It is also compared with this many at the beginning of the group."""
MARGIN = 0.1
"""Pairs whose similarity by one bit of each MinHash is lower by more are not compared further: 3 standard errors."""
_DOCUMENTS_AT_ONCE = 1 << 14

COPY = np.dtype([("key", "<u8"), ("original", "<u8")])
"""A document as `key`, and the better one that has the same shingles."""
PAIR = np.dtype([("key", "<u8"), ("other", "<u8")])
EDGE = np.dtype(
    [("key", "<u8"), ("tie", "<u8"), ("worse", "<u8"), ("better", "<u8"), ("rank", "<u8"), ("similarity", "<f4")]
)
"""Two similar documents: the inverted rank of the worse one as `key` and `tie`, and the rank of the better one."""


class Copies(PipelineStep):
    """Documents with the same shingles: the best of them stands for all in the stages that follow."""

    type = "🫂 - DEDUP"
    name = "copies"

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def run(self, data: Any, rank: int, world_size: int) -> None:
        runs = sorted(self.store.signatures.glob("*.contents"))
        found = read_range(runs, CONTENT, *share(rank, world_size))
        order = np.lexsort((found["id"], ~found["tie"], ~found["rank"], found["rest"], found["key"]))
        found = found[order]
        new = np.ones(len(found), bool)
        new[1:] = (found["key"][1:] != found["key"][:-1]) | (found["rest"][1:] != found["rest"][:-1])
        best = np.maximum.accumulate(np.where(new, np.arange(len(found)), 0))
        copies = np.empty(len(found) - new.sum(), COPY)
        copies["key"], copies["original"] = found["id"][~new], found["id"][best][~new]
        write_run(self.store.copies / f"{rank:05d}", copies)


class Pairs(PipelineStep):
    """Pairs from some ranges of the keys of some MinHash groups."""

    type = "🫂 - DEDUP"
    name = "pairs"

    def __init__(self, store: Store, pieces: int) -> None:
        super().__init__()
        self.store, self.pieces = store, pieces

    def run(self, data: Any, rank: int, world_size: int) -> None:
        copies = np.sort(read_range(files_of(self.store.copies), COPY)["key"])
        jobs = range(rank, self.store.options.buckets * self.pieces, world_size)
        found = [self._of(*divmod(job, self.pieces), copies) for job in jobs]
        write_run(self.store.pairs / f"{rank:05d}", np.unique(np.concatenate(found)))

    def _of(self, band: int, piece: int, copies: np.ndarray) -> np.ndarray:
        bands, found = self.store.options.buckets, [np.empty(0, BAND)]
        for path in sorted(self.store.signatures.glob("*.bands")):
            run = read_records(path, BAND)
            count = len(run) // bands
            found.append(np.array(between(run[band * count : (band + 1) * count], *share(piece, self.pieces))))
        records = np.concatenate(found)
        records = records[_in_groups(records["key"])]
        if len(copies):
            places = np.minimum(np.searchsorted(copies, records["id"]), len(copies) - 1)
            records = records[copies[places] != records["id"]]
        return propose(records, self.store.options.similarity)


def _in_groups(keys: np.ndarray) -> np.ndarray:
    """Return which keys occur more than once."""
    _, places, counts = np.unique(keys, return_inverse=True, return_counts=True)
    return counts[places] > 1


def propose(records: np.ndarray, similarity: float) -> np.ndarray:
    """Return pairs of documents with equal keys whose sizes allow the similarity.

    A large group does not give all its pairs: see WINDOW and HEADS. The pairs do not depend on the order of files.
    """
    records = records[np.lexsort((records["id"], records["tie"], records["size"], records["key"]))]
    keys, sizes, numbers = records["key"], records["size"], records["id"]
    places = np.arange(len(records))
    starts = np.ones(len(records), bool)
    starts[1:] = keys[1:] != keys[:-1]
    head = np.maximum.accumulate(np.where(starts, places, 0))
    within = places - head
    found = [np.empty(0, PAIR)]
    for distance in range(1, WINDOW + 1):
        found.append(_pairs(numbers, sizes, places - distance, within >= distance, similarity))
    for first in range(HEADS):
        found.append(_pairs(numbers, sizes, head + first, within - first > WINDOW, similarity))
    return np.unique(np.concatenate(found))


def _pairs(numbers: np.ndarray, sizes: np.ndarray, others: np.ndarray, wanted: np.ndarray, least: float) -> np.ndarray:
    """Return pairs of each wanted document with another one that has no more shingles."""
    own = np.flatnonzero(wanted)
    other = others[own]
    fits = sizes[other] >= least * sizes[own]
    one, two = numbers[own[fits]], numbers[other[fits]]
    pairs = np.empty(len(one), PAIR)
    pairs["key"], pairs["other"] = np.maximum(one, two), np.minimum(one, two)
    return pairs


class Compare(PipelineStep):
    """The similarity of the pairs of one part's documents with earlier ones."""

    type = "🫂 - DEDUP"
    name = "similarities"

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def run(self, data: Any, rank: int, world_size: int) -> None:
        runs = files_of(self.store.pairs)
        count = len(self.store.documents(rank))
        found = [np.empty(0, EDGE)]
        for first in range(0, count, _DOCUMENTS_AT_ONCE):
            begin, end = (int(ids(rank, place)) for place in (first, first + _DOCUMENTS_AT_ONCE))
            pairs = np.unique(read_range(runs, PAIR, begin, end))
            found.extend(self._compare(pairs))
        write_run(self.store.edges / f"{rank:05d}", np.concatenate(found))

    def _compare(self, pairs: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the edges of some pairs, which read one other part after another."""
        if not len(pairs):
            return
        pairs = pairs[np.argsort(pairs["other"], kind="stable")]
        own = _Part(self.store, int(pairs["key"][0] >> np.uint64(32)))
        parts = pairs["other"] >> np.uint64(32)
        cuts = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(pairs)]
        for begin, end in pairwise(cuts):
            some = pairs[begin:end]
            yield own.edges(_Part(self.store, int(parts[begin])), some)


class _Part:
    """The documents of a part as the comparison needs them."""

    def __init__(self, store: Store, part: int) -> None:
        self.least, self.hashes = store.options.similarity, store.options.buckets * store.options.hashes
        self.part, self.rows, self.sketches = part, store.documents(part), store.sketches(part)

    def sketch(self, row: Any) -> np.ndarray:
        start = int(row["start"])
        return self.sketches[start : start + min(int(row["size"]), LONGEST_SKETCH)]

    def edges(self, other: "_Part", pairs: np.ndarray) -> np.ndarray:
        """Return the edges of pairs whose documents are one of this part and one of the other."""
        one = self.rows[pairs["key"] & np.uint64(0xFFFFFFFF)]
        two = other.rows[pairs["other"] & np.uint64(0xFFFFFFFF)]
        likely = self._likely(one["bits"], two["bits"])
        pairs, one, two = pairs[likely], one[likely], two[likely]
        similarities = [jaccard(self.sketch(a), other.sketch(b), LONGEST_SKETCH) for a, b in zip(one, two, strict=True)]
        similarity = np.array(similarities, np.float32)
        first = _better(one, two, pairs["key"], pairs["other"])
        edges = np.empty(len(pairs), EDGE)
        edges["similarity"] = similarity
        edges["worse"] = np.where(first, pairs["other"], pairs["key"])
        edges["better"] = np.where(first, pairs["key"], pairs["other"])
        edges["key"] = ~np.where(first, two["rank"], one["rank"])
        edges["tie"] = ~np.where(first, two["tie"], one["tie"])
        edges["rank"] = np.where(first, one["rank"], two["rank"])
        return edges[similarity >= self.least]

    def _likely(self, one: np.ndarray, two: np.ndarray) -> np.ndarray:
        differing = np.bitwise_count(one ^ two).sum(axis=1)
        return 1 - 2 * differing / self.hashes >= self.least - self.margin

    @property
    def margin(self) -> float:
        """Return MARGIN, and more for fewer hashes than by default."""
        return max(MARGIN, 2 / self.hashes**0.5)


def _better(one: np.ndarray, two: np.ndarray, id_one: np.ndarray, id_two: np.ndarray) -> np.ndarray:
    """Return where the first document is the better copy: longer, then preferred, then by the hash of its text."""
    by_tie = np.where(one["tie"] != two["tie"], one["tie"] > two["tie"], id_one < id_two)
    return np.where(one["rank"] != two["rank"], one["rank"] > two["rank"], by_tie)
