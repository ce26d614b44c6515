"""Find the origin of a document in a shard: its raw file and record, from the manifest alone."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.shuffle import document_order
from megatron_blackmamba.formats.shards import ShardManifest, SourceFile


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


def places_of(manifest: ShardManifest, file: str, record: int) -> list[int] | None:
    """Return the places in the shard of a raw record: none if it was skipped. None if the shard has no such file.

    file: its name in the manifest, or a path that ends with it.
    """
    places: list[int] = []
    before, known = 0, False
    for source in manifest.sources:
        if file == source.name or file.endswith(f"/{source.name}"):
            known = True
            number = _number_of(manifest, source, record)
            places += [] if number is None else [before + number]
        before += source.documents
    if not known:
        return None
    if not manifest.shuffled:
        return places
    order = _order(manifest.seed, manifest.shard, manifest.documents)
    return [int(np.flatnonzero(order == number)[0]) for number in places]


def _number_of(manifest: ShardManifest, source: SourceFile, record: int) -> int | None:
    """Return the document number of a record in its file, or None for a skipped record."""
    if sum(manifest.rejected.values()) > len(manifest.rejects):
        raise InputError(
            f"{source.name}: its shard lists only the first {len(manifest.rejects)} of the records it skipped, so a "
            "record cannot be traced to a document"
        )
    skipped = [reject.record for reject in manifest.rejects if reject.source == source.name]
    number = record - 1 - sum(other < record for other in skipped)
    return number if record not in skipped and 0 <= number < source.documents else None


@lru_cache(maxsize=4)
def _order(seed: int, shard: int, documents: int) -> np.ndarray:
    return document_order(seed, shard, documents)
