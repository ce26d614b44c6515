"""Near-copies between groups of token shards, by the token ids on disk: MinHash proposes, exact similarity decides."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_blackmamba.data_tools.overlaps import blocks_of
from megatron_blackmamba.formats.shards import Shard

SIMILARITY = 0.6
"""Least Jaccard similarity of near-copies, of their distinct pairs of neighbouring tokens."""
BANDS = 9
"""Pairs of MinHashes of a document; one that two documents share proposes them: 98% at the threshold."""
MOST_PAIRS = 50_000
"""Proposed pairs that are compared, chosen at random where there are more."""
_EXAMPLES = 3
_FACTORS = np.random.default_rng(7).integers(1 << 62, 1 << 63, (BANDS, 2, 2), np.uint64) | np.uint64(1)
_HALF = np.uint64(29)


Place = tuple[Shard, int]
"""A shard, and the number of a document in it."""


@dataclass
class NearCopies:
    """Documents of each group that have a near-copy in another, or the same."""

    groups: list[str]
    compared: list[int]
    """Documents of each group that were compared."""
    documents: list[int]
    found: np.ndarray
    """`[groups, groups]`: documents of the first with a near-copy in the second."""
    examples: dict[tuple[int, int], list[tuple[int, int, float]]] = field(default_factory=dict)
    """For two groups: pairs, as numbers in `places`, and their similarity. Each pair of groups is listed once."""
    places: list[Place] = field(default_factory=list)
    proposed: int = 0
    checked: int = 0
    """Pairs that MinHash proposed, and those whose similarity was computed: if they are fewer, `found` is too low."""


@dataclass(frozen=True)
class _Documents:
    """Documents that are compared: the group of each, its bands, and where it is."""

    group: np.ndarray
    bands_NB: np.ndarray
    shard: np.ndarray
    place: np.ndarray


def near_copies(groups: Mapping[str, Sequence[Shard]], most_tokens: int) -> NearCopies:
    """Compare the first documents of each group, of about `most_tokens`: whole blocks of a few million are read."""
    shards: list[Shard] = []
    parts: list[_Documents] = []
    for number, members in enumerate(groups.values()):
        left = most_tokens
        for shard in members:
            if left <= 0:
                break
            parts += _documents(shard, number, len(shards), left)
            left -= shard.manifest.tokens
            shards.append(shard)
    columns = (np.concatenate([getattr(part, name) for part in parts]) for name in _Documents.__annotations__)
    documents = _Documents(*columns)
    compared = np.bincount(documents.group, minlength=len(groups)).tolist()
    totals = [sum(shard.manifest.documents for shard in members) for members in groups.values()]
    result = NearCopies([*groups], compared, totals, np.zeros((len(groups), len(groups)), np.int64))
    copies: dict[tuple[int, int], set[int]] = {}
    shingles = _Shingles(shards, documents)
    pairs = _proposed(documents, len(groups))
    result.proposed = len(pairs)
    if len(pairs) > MOST_PAIRS:
        pairs = pairs[np.random.default_rng(0).permutation(len(pairs))[:MOST_PAIRS]]
    result.checked = len(pairs)
    for one, other in pairs.tolist():
        similarity = shingles.jaccard(one, other)
        if similarity < SIMILARITY:
            continue
        for a, b in ((one, other), (other, one)):
            key = int(documents.group[a]), int(documents.group[b])
            copies.setdefault(key, set()).add(a)
            if key[0] > key[1] or (key[0] == key[1] and a > b):
                continue
            examples = result.examples.setdefault(key, [])
            if len(examples) < _EXAMPLES:
                examples.append((len(result.places), len(result.places) + 1, similarity))
                result.places += [shingles.where(a), shingles.where(b)]
    for (a, b), found in copies.items():
        result.found[a, b] = len(found)
    return result


def _documents(shard: Shard, group: int, number: int, most_tokens: int) -> Iterator[_Documents]:
    read = 0
    for block in blocks_of(shard):
        if read >= most_tokens:
            return
        read += len(block.ids)
        long = block.lengths > 1  # one token is no pair
        pairs = _pairs(block.ids)
        starts = np.concatenate([[0], np.cumsum(block.lengths)[:-1]])
        last = starts + block.lengths - 1
        inside = np.ones(len(block.ids), bool)
        inside[last] = False  # a pair of two documents
        pairs = pairs[inside[:-1]] if len(pairs) else pairs
        firsts = np.concatenate([[0], np.cumsum(block.lengths[long] - 1)[:-1]]) if long.any() else starts[:0]
        count = int(long.sum())
        if count:
            hashes = [_band(pairs, firsts, factors) for factors in _FACTORS]
            same = np.full(count, group), np.full(count, number)
            yield _Documents(same[0], np.stack(hashes, axis=1), same[1], block.places[long])


def _band(values: np.ndarray, firsts: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return two MinHashes of each document as one number."""
    one, two = (np.minimum.reduceat(_mixed(values, *each), firsts) for each in factors)
    return one * _FACTORS[0, 0, 0] ^ two


def _pairs(ids: np.ndarray) -> np.ndarray:
    wide = ids.astype(np.uint64)
    return (wide[:-1] << np.uint64(32)) | wide[1:]


def _mixed(values: np.ndarray, one: np.uint64, two: np.uint64) -> np.ndarray:
    mixed = values * one
    mixed ^= mixed >> _HALF
    mixed *= two
    return mixed ^ (mixed >> _HALF)


def _proposed(documents: _Documents, groups: int) -> np.ndarray:
    """Return pairs that share a band: each document with the first one of every group."""
    found: list[np.ndarray] = []
    number = len(documents.group)
    for column in documents.bands_NB.T:
        order = np.argsort(column, kind="stable")
        run = np.cumsum(np.concatenate([[False], np.diff(column[order]) != 0])) if number else order
        for group in range(groups):
            of_group = documents.group[order] == group
            first = np.full(number + 1, -1)
            places = np.flatnonzero(of_group)[::-1]
            first[run[places]] = order[places]  # the last to be set is the first of its run
            partner = first[run]
            paired = (partner >= 0) & (partner != order)
            pairs = np.stack([order[paired], partner[paired]], axis=1)
            found.append(np.sort(pairs, axis=1))
    return np.unique(np.concatenate(found), axis=0) if found else np.empty((0, 2), np.int64)


class _Shingles:
    """The distinct pairs of tokens of documents, read when they are needed."""

    def __init__(self, shards: Sequence[Shard], documents: _Documents) -> None:
        self.shards, self.documents = shards, documents

    def where(self, number: int) -> Place:
        return self.shards[int(self.documents.shard[number])], int(self.documents.place[number])

    def jaccard(self, one: int, other: int) -> float:
        """Return the similarity of two documents."""
        first, second = self._of(one), self._of(other)
        shared = len(np.intersect1d(first, second, assume_unique=True))
        return shared / max(1, len(first) + len(second) - shared)

    def _of(self, number: int) -> np.ndarray:
        shard, place = self.where(number)
        ids = shard.document(place)
        return np.unique(_pairs(ids[:-1] if len(ids) > 1 and ids[-1] == shard.manifest.eod_id else ids))
