"""Documents that shards share, by the token ids on disk: exact, for shards of any age and any tool."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from megatron_blackmamba.data_tools.provenance import origin
from megatron_blackmamba.formats.document_sample import (
    DocumentSample,
    DocumentSampler,
    document_hashes,
    document_keys,
    is_among,
    upper_half,
)
from megatron_blackmamba.formats.mixture import MixtureError
from megatron_blackmamba.formats.shards import Shard

_BLOCK_TOKENS = 4 << 20

Opened = Mapping[str, tuple[list[Shard], list[Shard]]]
"""Training and validation shards by source."""


@dataclass(frozen=True)
class Shared:
    """Validation documents of a source that are in training shards too."""

    found: int
    documents: int
    """Distinct validation documents of the source."""
    example: str

    @property
    def share(self) -> float:
        return self.found / self.documents


@dataclass(frozen=True)
class Block:
    """Adjacent documents of a shard: ids without EOD, the length of each, and its place in the shard."""

    ids: np.ndarray
    lengths: np.ndarray
    places: np.ndarray


def blocks_of(shard: Shard) -> Iterator[Block]:
    """Yield the documents of a shard; those without a token are skipped."""
    tokens, idx, eod_id = shard.token_ids, shard.idx, shard.manifest.eod_id
    bounds = np.concatenate([[0], np.cumsum(idx.sequence_lengths, dtype=np.int64)])[idx.document_indices]
    lengths = np.diff(bounds)
    places = np.flatnonzero(lengths)
    ends, lengths = bounds[1:][places], lengths[places]
    first = 0
    while first < len(places):
        start = int(ends[first] - lengths[first])
        last = max(first + 1, int(np.searchsorted(ends, start + _BLOCK_TOKENS, side="right")))
        ids, inside = tokens[start : int(ends[last - 1])], lengths[first:last]
        final = ends[first:last] - 1 - start
        closing = final[(ids[final] == eod_id) & (inside > 1)]
        kept = np.ones(len(ids), bool)
        kept[closing] = False
        closed = ~kept[final]
        yield Block(ids[kept].astype(np.uint32), inside - closed, places[first:last])
        first = last


def sample_of(shard: Shard) -> DocumentSample:
    """Return the sample for the manifest of a shard that another tool made."""
    sampler = DocumentSampler()
    for block in blocks_of(shard):
        sampler.add(block.ids, block.lengths, block.places)
    return sampler.sample()


def check_shared_documents(opened: Opened, most: float, cores: int = 1) -> list[str]:
    """Refuse a source of which training shards hold too many validation documents; tell of those that they hold."""
    findings = []
    for name, shared in shared_documents(opened, cores).items():
        line = (
            f"source {name!r}: {shared.found:,} of its {shared.documents:,} validation documents ({shared.share:.2%}) "
            f"are in training shards too, for example {shared.example}"
        )
        if shared.share > most:
            raise MixtureError(
                f"{line}: make the training shards again without them, or set max_overlap in the mixture file to "
                "allow it"
            )
        findings.append(line)
    return findings


def shared_documents(opened: Opened, cores: int = 1) -> dict[str, Shared]:
    """Return, by source, the validation documents that are in training shards too. Reads all tokens."""
    held_out = {name: _hashes_of(shards) for name, (_, shards) in opened.items() if shards}
    if not held_out:
        return {}
    wanted = np.unique(np.concatenate(list(held_out.values())))
    training = [shard for shards, _ in opened.values() for shard in shards]
    with ThreadPoolExecutor(cores) as pool:
        found = np.unique(np.concatenate(list(pool.map(lambda shard: _those_in(shard, wanted), training))))
    shared = {name: hashes[is_among(hashes, found)] for name, hashes in held_out.items()}
    return {
        name: Shared(len(hashes), len(held_out[name]), _example(opened[name][1], hashes))
        for name, hashes in shared.items()
        if len(hashes)
    }


def _hashes_of(shards: list[Shard]) -> np.ndarray:
    """Return the hash of every document, each once."""
    found = [_hashed(block) for shard in shards for block in blocks_of(shard)]
    return np.unique(np.concatenate(found)) if found else np.empty(0, np.uint64)


def _those_in(shard: Shard, wanted: np.ndarray) -> np.ndarray:
    """Return the wanted hashes that a shard has."""
    candidates = np.unique(upper_half(wanted))
    found = [np.empty(0, np.uint64)]
    for block in blocks_of(shard):
        keys = document_keys(block.ids, block.lengths)
        possible = np.flatnonzero(is_among(upper_half(keys), candidates))
        if len(possible):
            hashes = document_hashes(block.ids, block.lengths, keys, possible)
            found.append(np.unique(hashes[is_among(hashes, wanted)]))
    return np.concatenate(found)


def _hashed(block: Block) -> np.ndarray:
    keys = document_keys(block.ids, block.lengths)
    return document_hashes(block.ids, block.lengths, keys, np.arange(len(keys)))


def _example(shards: list[Shard], hashes: np.ndarray) -> str:
    """Return the raw file and record of a document with one of these hashes."""
    for shard in shards:
        for block in blocks_of(shard):
            at = np.flatnonzero(is_among(_hashed(block), hashes))
            if len(at):
                return f"{origin(shard.manifest, int(block.places[at[0]]))} of {shard.prefix}"
    raise AssertionError("in no shard")
