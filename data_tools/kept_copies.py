"""The last stages of deduplication: the choice of the documents that are kept, and the report of the clusters.

The documents are decided from the best to the worst. One is removed if it is similar to a document that is already
kept; of several, the most similar counts. So each removed document resembles a kept one, and nothing chains.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from datatrove.pipeline.base import PipelineStep

from megatron_blackmamba.data_tools.cleaning import Cleaning
from megatron_blackmamba.data_tools.near_pairs import COPY, EDGE
from megatron_blackmamba.data_tools.parts import RemovalLog
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.shingles import jaccard
from megatron_blackmamba.data_tools.signatures import LONGEST_SKETCH, Store
from megatron_blackmamba.data_tools.sorted_runs import files_of, ranges, read_range, read_records, write_records
from megatron_blackmamba.formats import atomic

EDGES_AT_ONCE = 1 << 23
KEPT = 0xFFFFFFFF
"""The number in place of a kept document's better copy."""
REPORTED = 20
COMPARED = 64
"""Documents of a reported cluster that are compared with each other."""
SUSPICIOUS_SIZE, SUSPICIOUS_SHARE, SUSPICIOUS_MARGIN = 20, 0.5, 0.1
"""A cluster of many documents is suspicious if this share of them is this close to the threshold."""


class Choose(PipelineStep):
    """For every document, the better copy that is kept in its place, and their similarity."""

    type = "🫂 - DEDUP"
    name = "choice"

    def __init__(self, cleaning: Cleaning, store: Store) -> None:
        super().__init__()
        self.cleaning, self.store = cleaning, store

    def run(self, data: Any, rank: int, world_size: int) -> None:
        offsets = np.concatenate(([0], np.cumsum(self.store.counts(len(self.cleaning.parts)))))
        total = int(offsets[-1])
        if total >= KEPT:
            raise InputError(f"{total:,} documents: dedup takes fewer than {KEPT:,}. Clean them in two calls")
        kept, similarity = np.full(total, KEPT, np.uint32), np.ones(total, np.float32)
        removed = bytearray(total)
        edges = files_of(self.store.edges)
        for first, end in ranges(edges, EDGE, EDGES_AT_ONCE):
            some = read_range(edges, EDGE, first, end)
            some = some[np.lexsort((some["worse"], some["tie"], some["key"]))]
            chosen = decide(some, dense(some["worse"], offsets), dense(some["better"], offsets), removed)
            worse, better, alike = chosen
            kept[worse], similarity[worse] = better, alike
        for path in files_of(self.store.copies):
            copies = read_records(path, COPY)
            copy, original = dense(copies["key"], offsets), dense(copies["original"], offsets)
            gone = kept[original] != KEPT
            kept[copy], similarity[copy] = np.where(gone, kept[original], original), similarity[original]
        count = int((kept != KEPT).sum())
        self._refuse_too_many(count, total)
        report = Clusters(self.cleaning, self.store, offsets, kept, similarity).report()
        write_records(self.store.choice / "similarity", similarity)
        write_records(self.store.choice / "kept", kept)
        atomic.write_json(self.cleaning.work / "clusters.json", report)

    def _refuse_too_many(self, count: int, total: int) -> None:
        most = self.store.options.at_most
        if most is not None and count > most * total:
            raise InputError(
                f"--at-most {most:g}: {count:,} of {total:,} documents ({count / total:.1%}) are near-duplicates. "
                "Nothing is written. Check the inputs, raise --similarity, or repeat this with a higher --at-most"
            )


def dense(numbers: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the numbers of documents over all parts, by their ids."""
    return offsets[(numbers >> np.uint64(32)).astype(np.int64)] + (numbers & np.uint64(0xFFFFFFFF)).astype(np.int64)


def decide(
    edges: np.ndarray, worse: np.ndarray, better: np.ndarray, removed: bytearray
) -> tuple[list[int], list[int], list[float]]:
    """Decide the worse documents of edges in order; return those that go, for which, and their similarity.

    removed: Updated; 1 for each document that was removed.
    """
    gone: list[int] = []
    kept: list[int] = []
    alike: list[float] = []
    last, best = -1, (0.0, 0)
    columns = (worse.tolist(), better.tolist(), edges["similarity"].tolist(), edges["rank"].tolist())
    for own, other, similarity, rank in zip(*columns, strict=True):
        if removed[other]:
            continue
        if own != last:
            gone.append(own)
            kept.append(other)
            alike.append(similarity)
            removed[own], last, best = 1, own, (similarity, rank)
        elif (similarity, rank) > best:
            kept[-1], alike[-1], best = other, similarity, (similarity, rank)
    return gone, kept, alike


class Clusters:
    """The kept documents with those that are removed for them."""

    def __init__(
        self, cleaning: Cleaning, store: Store, offsets: np.ndarray, kept: np.ndarray, similarity: np.ndarray
    ) -> None:
        self.cleaning, self.store, self.offsets, self.kept, self.similarity = cleaning, store, offsets, kept, similarity

    def report(self) -> dict[str, Any]:
        """Return the number of clusters, and the largest ones."""
        found, sizes = np.unique(self.kept[self.kept != KEPT], return_counts=True)
        places = np.lexsort((found, -sizes))[:REPORTED]
        return {
            "clusters": len(found),
            "largest": [self._described(int(found[place]), int(sizes[place])) for place in places],
        }

    def _described(self, kept: int, removed: int) -> dict[str, Any]:
        members = np.flatnonzero(self.kept == kept)
        alike = self.similarity[members]
        close = float((alike < self.store.options.similarity + SUSPICIOUS_MARGIN).mean())
        least, pair = self._least_similar([kept, *members[np.argsort(alike, kind="stable")][: COMPARED - 1].tolist()])
        return {
            "kept": self._where(kept),
            "documents": removed + 1,
            "least similar pair": [self._where(one) for one in pair],
            "similarity": round(least, 3),
            "close to the threshold": round(close, 3),
            "suspicious": removed + 1 >= SUSPICIOUS_SIZE and close >= SUSPICIOUS_SHARE,
        }

    def _least_similar(self, members: list[int]) -> tuple[float, tuple[int, int]]:
        sketches = [np.array(self._sketch(member)) for member in members]
        least, pair = 2.0, (members[0], members[0])
        for place, one in enumerate(sketches):
            for other in range(place):
                similarity = jaccard(one, sketches[other], LONGEST_SKETCH)
                if similarity < least:
                    least, pair = similarity, (members[other], members[place])
        return least, pair

    def _row(self, number: int) -> tuple[int, Any]:
        part = int(np.searchsorted(self.offsets, number, side="right")) - 1
        return part, self.store.documents(part)[number - int(self.offsets[part])]

    def _sketch(self, number: int) -> np.ndarray:
        part, row = self._row(number)
        start = int(row["start"])
        return self.store.sketches(part)[start : start + min(int(row["size"]), LONGEST_SKETCH)]

    def _where(self, number: int) -> str:
        part, row = self._row(number)
        return f"{self.cleaning.parts[part][int(row['source'])].name}:{int(row['record'])}"


class DropCopies(PipelineStep):
    """A filter of the documents of a part; the log of removals gets the kept copy and the similarity."""

    type = "🔻 - FILTER"
    name = "near-duplicates"

    def __init__(self, cleaning: Cleaning, store: Store) -> None:
        super().__init__()
        self.cleaning, self.store = cleaning, store

    def run(self, data: Any, rank: int, world_size: int) -> Iterator[Any]:
        removals = self._removals(rank)
        with RemovalLog(self.cleaning.notes, _noted) as log:
            for number, document in enumerate(data):
                if number not in removals:
                    yield document
                    continue
                document.metadata["kept"], document.metadata["similarity"] = removals[number]
                log.write(document, rank)

    def _removals(self, rank: int) -> dict[int, tuple[str, float]]:
        """Return the removed documents of a part, with the file and record of the kept one."""
        offsets = np.concatenate(([0], np.cumsum(self.store.counts(len(self.cleaning.parts)))))
        own = slice(int(offsets[rank]), int(offsets[rank + 1]))
        kept = read_records(self.store.choice / "kept", np.dtype("<u4"))[own]
        similarity = read_records(self.store.choice / "similarity", np.dtype("<f4"))[own]
        gone = np.flatnonzero(kept != KEPT)
        gone = gone[np.argsort(kept[gone], kind="stable")]
        parts = np.searchsorted(offsets, kept[gone], side="right") - 1
        removals: dict[int, tuple[str, float]] = {}
        for part in np.unique(parts).tolist():
            here = gone[parts == part]
            rows = self.store.documents(part)[kept[here].astype(np.int64) - offsets[part]]
            names = [source.name for source in self.cleaning.parts[part]]
            for number, row in zip(here.tolist(), rows, strict=True):
                removals[number] = f"{names[row['source']]}:{row['record']}", float(similarity[number])
        return removals


def _noted(document: Any) -> dict[str, Any]:
    return {key: document.metadata[key] for key in ("kept", "similarity")}
