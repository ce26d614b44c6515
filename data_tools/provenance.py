"""Find the origin of a document in a shard: its raw file and record, from the manifest alone."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.shuffle import document_order
from megatron_blackmamba.formats.remote import file_sha256
from megatron_blackmamba.formats.shards import ShardManifest, SourceFile

_order = lru_cache(maxsize=4)(document_order)


@dataclass(frozen=True)
class Origin:
    """A raw file, and the record in it, counted from 1; None where the manifest lists only some of the rejects."""

    source: str
    record: int | None

    def __str__(self) -> str:
        return self.source if self.record is None else f"{self.source}, record {self.record}"


def origin(manifest: ShardManifest, place: int) -> Origin:
    """Undo the shuffle, find the file, and count the records that were skipped before this one."""
    if not 0 <= place < manifest.documents:
        raise IndexError(f"document {place} of {manifest.documents}")
    number = int(_order(manifest.seed, manifest.shard, manifest.documents)[place]) if manifest.shuffled else place
    return Origin(*manifest.raw_record(number))


def source_called(file: str, sources: Iterable[SourceFile]) -> SourceFile | None:
    """Return the raw file of this name among the sources of a run's shards. Files of equal content are one.

    file: a name in a manifest, or a path that ends with it. A path to an existing file must lead to that very file.
    """
    found = {source.sha256: source for source in sources if file == source.name or file.endswith(f"/{source.name}")}
    if not found:
        return None
    path = Path(file)
    if path.is_file():
        size = path.stat().st_size
        same_size = [source for source in found.values() if source.bytes == size]
        if len(same_size) > 1:
            same_size = [source for source in same_size if source.sha256 == file_sha256(path)]
        if not same_size:
            raise InputError(f"{file}: no shard was made from this file, only from another of its name")
        return same_size[0]
    if len(found) > 1:
        raise InputError(
            f"{file}: the shards were made from {len(found)} files of this name. Give the path of an existing file"
        )
    return next(iter(found.values()))


def places_of(manifest: ShardManifest, file: SourceFile, record: int) -> list[int]:
    """Return the places in the shard of a raw record: none if it was skipped, or the file is in another shard."""
    places: list[int] = []
    before = 0
    for source in manifest.sources:
        if source.sha256 == file.sha256:
            number = _number_of(manifest, source, record)
            places += [] if number is None else [before + number]
        before += source.documents
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
    if skipped and sum(other.name == source.name for other in manifest.sources) > 1:
        raise InputError(f"{source.name}: its shard has several files of this name, and does not say whose it skipped")
    number = record - 1 - sum(other < record for other in skipped)
    if record in skipped:
        return None
    if source.mask is not None:
        inside = 0 <= number < len(source.mask) and source.mask[number]
        return int(source.mask[:number].sum()) if inside else None
    return number if 0 <= number < source.documents else None
