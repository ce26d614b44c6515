"""Near-duplicates removed with datatrove's four MinHash stages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_blackmamba.data_tools.cleaning import (
    Cleaning,
    Listing,
    PartWriter,
    RawDocuments,
    RemovalLog,
    Row,
    SpacedWords,
    read_notes,
)
from megatron_blackmamba.data_tools.options import DedupOptions
from megatron_blackmamba.data_tools.rejects import InputError

try:
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.utils.hashing import HashConfig
except ImportError:  # said by `require_datatrove`
    MinhashDedupSignature = MinhashDedupFilter = object

_SHINGLES_AT_ONCE = 128
"""N-grams hashed in one piece, which stays in the cache of a core."""
_PRIME = np.uint64((1 << 61) - 1)
CLUSTER = "minhash_cluster_id"


class _Signature(MinhashDedupSignature):
    """datatrove's first stage, with the same signatures in less time and bounded memory.

    A repeated n-gram cannot change a minimum, so distinct ones are hashed, in pieces, and without a division.
    """

    def get_signature(self, shingles: np.ndarray) -> list[list[int]]:
        a, b = self.parameters
        distinct = np.unique(shingles).reshape(-1, 1)
        smallest = np.full(self.num_hashes, self.config.hash_config.max, np.uint64)
        for first in range(0, len(distinct), _SHINGLES_AT_ONCE):
            hashes = modulo_prime(distinct[first : first + _SHINGLES_AT_ONCE] * a + b)
            hashes &= np.uint64(self.config.hash_config.max)
            np.minimum(smallest, hashes.min(axis=0), out=smallest)
        return smallest.reshape(self.config.num_buckets, -1).tolist()


def modulo_prime(values: np.ndarray) -> np.ndarray:
    """Return `values` modulo 2^61 - 1; values: any uint64, overwritten."""
    high = values >> np.uint64(61)
    values &= _PRIME
    values += high
    return np.subtract(values, _PRIME, out=values, where=values >= _PRIME)


class _Filter(MinhashDedupFilter):
    """datatrove's last stage, with the cluster of every document also in a part from which nothing is removed."""

    def run(self, data: Any, rank: int, world_size: int) -> Iterator[Any]:
        for kind in ("remove", "clusters"):
            if not self.data_folder.isfile(f"{rank:06d}.{kind}"):
                self.data_folder.open(f"{rank:06d}.{kind}", "wb").close()
        return super().run(data, rank, world_size)


def stages(cleaning: Cleaning, options: DedupOptions) -> list[Any]:
    """Return the executors of all stages in order; each depends on the one before."""
    if options.n_grams < 1 or options.buckets < 1 or options.hashes < 1:
        raise InputError("--n-grams, --buckets and --hashes are at least 1")
    config = MinhashConfig(
        n_grams=options.n_grams,
        num_buckets=options.buckets,
        hashes_per_bucket=options.hashes,
        hash_config=HashConfig(precision=32),
    )
    parts = len(cleaning.parts)
    signatures, pairs, clusters = (str(cleaning.work / name) for name in ("signatures", "pairs", "clusters"))
    words: Any = options.language or SpacedWords()  # datatrove has taken the punctuation out
    sign = _Signature(signatures, config=config, language=words)
    first = cleaning.executor("1_signatures", [RawDocuments(cleaning, noted=False), sign], parts)
    match = MinhashDedupBuckets(signatures, pairs, config=config, lines_to_buffer=1000)
    second = cleaning.executor("2_pairs", [match], options.buckets, first)
    join = MinhashDedupCluster(pairs, clusters, config=config, save_cluster_id=True, lines_to_buffer=1000)
    third = cleaning.executor("3_clusters", [join], 1, second)
    drop = _Filter(clusters, RemovalLog(cleaning.notes, _cluster), load_cluster_ids=True)
    steps = [RawDocuments(cleaning), drop, PartWriter(cleaning, _cluster_of_kept)]
    fourth = cleaning.executor("4_documents", steps, parts, third)
    listing = Listing(cleaning, _rows, spent=[Path(signatures), Path(pairs)])
    return [first, second, third, fourth, cleaning.executor("5_removals", [listing], 1, fourth)]


def _rows(notes: Path) -> Iterator[Row]:
    kept = {note["cluster"]: f"{note['file']}:{note['record']}" for note in read_notes(notes, "kept")}
    for note in read_notes(notes, "removed"):
        cluster = note["cluster"]
        yield note["file"], note["record"], "near-duplicate", kept[cluster], f"cluster {cluster}"


def _cluster(document: Any) -> dict[str, Any]:
    return {"cluster": document.metadata[CLUSTER]}


def _cluster_of_kept(document: Any) -> dict[str, Any] | None:
    return _cluster(document) if document.metadata[CLUSTER] >= 0 else None
