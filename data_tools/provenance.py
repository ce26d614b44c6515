"""Where a document of a shard came from: its file and its record there, from the manifest alone."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_blackmamba.data_tools.shuffle import document_order
from megatron_blackmamba.formats.shards import ShardManifest


@dataclass(frozen=True)
class Origin:
    """A raw file, and the record in it, counted from 1; None where the manifest lists only some of the rejects."""

    source: str
    record: int | None

    def __str__(self) -> str:
        return self.source if self.record is None else f"{self.source}, record {self.record}"


def origin(manifest: ShardManifest, place: int) -> Origin:
    """Undo the shuffle, find the file, and count the records that were skipped before this one."""
    number = int(_order(manifest.seed, manifest.shard, manifest.documents)[place]) if manifest.shuffled else place
    for source in manifest.sources:
        if number < source.documents:
            break
        number -= source.documents
    else:
        raise IndexError(f"document {place} of {manifest.documents}")
    if sum(manifest.rejected.values()) > len(manifest.rejects):
        return Origin(source.name, None)
    record = number + 1
    for skipped in sorted(reject.record for reject in manifest.rejects if reject.source == source.name):
        if skipped > record:
            break
        record += 1
    return Origin(source.name, record)


@lru_cache(maxsize=4)
def _order(seed: int, shard: int, documents: int) -> np.ndarray:
    return document_order(seed, shard, documents)
