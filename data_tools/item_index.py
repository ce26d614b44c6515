"""An index of evaluation items that finds them in a text, word for word or with a few words changed."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import repeat
from typing import Any

import numpy as np

from megatron_blackmamba.data_tools import words as by_words
from megatron_blackmamba.data_tools.evaluation_items import Item
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.words import SplitWords, bits, information

FEWEST_WORDS = 4
"""Texts of fewer words are everywhere: they are not looked for."""
FEWEST_BITS = 34.0
"""Texts and n-grams of less information are not looked for: about three words that are not common, or five common."""
APPROXIMATE_BITS = 48.0
"""Information that the words found must have if others were changed."""
SHARE = 0.75
"""Share of the words of a text, and of its numbers, that must be found in order."""
SHARE_OF_BITS = 0.85
"""Share of its information that they must have: `how do you deal with` is not `how do you deal with nausea?`."""
DENSITY = 0.5
"""Share of the words of the passage that must be the text's, so that words may be added, such as JSON keys."""
APPROXIMATE_DENSITY = 0.7
"""The same if words of the text were changed."""
WINDOW = 24
"""Longer texts are looked for in windows of this many words."""
MOST_HOLDERS = 10
"""An n-gram that more items hold is of their form, such as a common prompt, and identifies none."""
_SHORT, _SHORT_SEED, _SEED = 12, 3, 5
"""Texts of fewer than 12 words are found by 3 consecutive words of them, others by 5."""

Ids = np.ndarray[Any, np.dtype[np.int64]]
Keys = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True)
class Passage:
    """Words `start` to `end` of a text, which match an item."""

    start: int
    end: int
    item: str


class _Table:
    """Sorted keys of n-grams; a smaller table of bytes tells most other keys apart without a search."""

    def __init__(self, keys: Keys) -> None:
        self.keys = np.unique(keys)
        self._shift = np.uint64(64 - max(10, int(4 * len(self.keys)).bit_length()))
        self._maybe = np.zeros(1 << (64 - int(self._shift)), bool)
        self._maybe[self.keys >> self._shift] = True

    def places(self, keys: Keys) -> tuple[Ids, Ids]:
        """Return which of `keys` are in the table, and the place of each of these in it."""
        at = np.flatnonzero(self._maybe[keys >> self._shift])
        if not len(at):
            return at, at
        found = np.searchsorted(self.keys, keys[at])
        found[found == len(self.keys)] = 0
        same = self.keys[found] == keys[at]
        return at[same], found[same]


class _Seeds:
    """The n-grams of probes, each with the probes that hold it and where."""

    def __init__(self, size: int, probes: Sequence[tuple[int, Ids]], hashed: Keys) -> None:
        self.size = size
        ids = _joined([ids for _, ids in probes])
        lengths = np.array([len(ids) for _, ids in probes], np.int64)
        number, offset = _places(lengths, size)
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64) if len(probes) else lengths
        keys = n_gram_keys(hashed[ids], size)[starts[number] + offset] if len(number) else np.zeros(0, np.uint64)
        order = np.argsort(keys, kind="stable")
        self.table = _Table(keys)
        names = np.array([probe for probe, _ in probes], np.int64)
        self.probes, self.offsets = names[number[order]].astype(np.int32), offset[order].astype(np.int32)
        self.bounds = np.append(np.searchsorted(keys[order], self.table.keys), len(keys))

    def hits(self, hashed: Keys) -> Iterator[tuple[int, int]]:
        """Yield a probe and where it would begin, for each of its n-grams in the text."""
        if len(hashed) < self.size:
            return
        for at, place in zip(
            *(each.tolist() for each in self.table.places(n_gram_keys(hashed, self.size))), strict=True
        ):
            first, last = self.bounds[place], self.bounds[place + 1]
            if last - first <= 3 * MOST_HOLDERS:
                yield from zip(self.probes[first:last].tolist(), (at - self.offsets[first:last]).tolist(), strict=True)


class ItemIndex:
    """The n-grams of the items' texts, and these texts as probes that are found with a few words changed."""

    def __init__(self, items: Iterable[Item], n_grams: int, split: SplitWords = by_words.split_words) -> None:
        if n_grams <= FEWEST_WORDS:
            raise InputError(f"--n-grams {n_grams}: at least {FEWEST_WORDS + 1}")
        self.n_grams, self.split = n_grams, split
        self.names: list[str] = []
        self.too_short: list[str] = []
        """Items with too little distinctive text to look for."""
        self._ids: dict[str, int] = {}
        texts: list[tuple[int, Ids]] = []
        holders: dict[tuple[int, ...], list[int]] = {}
        for number, item in enumerate(items):
            self.names.append(item.name)
            found = [split(by_words.normalize(text)) for text in item.texts]
            kept = [words for words in found if len(words) >= FEWEST_WORDS and information(words) >= FEWEST_BITS]
            if not kept:
                self.too_short.append(item.name)
            for words in kept:
                ids = np.array([self._ids.setdefault(word, len(self._ids) + 1) for word in words], np.int64)
                texts.append((number, ids))
                for start in _windows(len(ids)):
                    if information(words[start : start + WINDOW]) >= FEWEST_BITS:
                        held = holders.setdefault(tuple(ids[start : start + WINDOW].tolist()), [])
                        if number not in held[-1:]:
                            held.append(number)
        vocabulary = ["", *self._ids]
        self._bits = [bits(word) for word in vocabulary]
        self._numbers = frozenset(self._ids[word] for word in vocabulary[1:] if word.isdigit())
        self._hashed = np.random.default_rng(0).integers(1, 2**64, len(vocabulary), np.uint64)
        self._hashed[0] = 0
        self._grams, self._holders = self._exact(texts)
        rare = {probe: held[0] for probe, held in holders.items() if len(held) <= MOST_HOLDERS}
        self._probes, self._items = list(rare), list(rare.values())
        short = [(i, np.array(probe)) for i, probe in enumerate(self._probes) if len(probe) < _SHORT]
        long = [(i, np.array(probe)) for i, probe in enumerate(self._probes) if len(probe) >= _SHORT]
        self._seeds = [_Seeds(_SHORT_SEED, short, self._hashed), _Seeds(_SEED, long, self._hashed)]

    def _exact(self, texts: Sequence[tuple[int, Ids]]) -> tuple[_Table, Ids]:
        """Return the n-grams with enough information, and an item that holds each."""
        size = self.n_grams
        long = [(number, ids) for number, ids in texts if len(ids) >= size]
        if not long:
            return _Table(np.zeros(0, np.uint64)), np.zeros(0, np.int64)
        ids = _joined([ids for _, ids in long])
        lengths = np.array([len(ids) for _, ids in long], np.int64)
        text, offset = _places(lengths, size)
        at = (np.cumsum(lengths) - lengths)[text] + offset
        windows = np.sort(np.lib.stride_tricks.sliding_window_view(ids, size)[at], axis=1)
        worth = np.array(self._bits)[windows]
        worth[:, 1:][windows[:, 1:] == windows[:, :-1]] = 0  # a word counts once
        enough = worth.sum(axis=1) >= FEWEST_BITS
        keys = n_gram_keys(self._hashed[ids], size)[at[enough]]
        holders = np.array([number for number, _ in long], np.int64)[text[enough]]
        pairs = np.unique(np.stack([keys, holders.astype(np.uint64)], axis=1), axis=0)
        distinct, first, count = np.unique(pairs[:, 0], return_index=True, return_counts=True)
        rare = count <= MOST_HOLDERS
        return _Table(distinct[rare]), pairs[first[rare], 1].astype(np.int64)

    def find(self, words: Sequence[str]) -> list[Passage]:
        """Return the passages of a text, in order and apart from each other."""
        if len(words) < FEWEST_WORDS:
            return []
        ids = np.fromiter(map(self._ids.get, words, repeat(0)), np.int64, len(words))
        hashed = self._hashed[ids]
        found: list[Passage] = []
        if len(ids) >= self.n_grams:
            places, numbers = self._grams.places(n_gram_keys(hashed, self.n_grams))
            for place, number in zip(places.tolist(), numbers.tolist(), strict=True):
                found.append(Passage(place, place + self.n_grams, self.names[self._holders[number]]))
        candidates: dict[int, list[int]] = defaultdict(list)
        for seeds in self._seeds:
            for probe, begin in seeds.hits(hashed):
                candidates[probe].append(begin)
        for probe, begins in candidates.items():
            found += self._like(probe, sorted(begins), ids)
        return _apart(found)

    def _like(self, probe: int, begins: Sequence[int], ids: Ids) -> Iterator[Passage]:
        """Yield the passages that are alike enough to a probe, which may begin at these places."""
        wanted = self._probes[probe]
        slack = 2 + len(wanted) // 2
        done = begins[0]  # negative where the text lacks the first words
        for begin in begins:
            if begin < done:
                continue
            first = max(0, begin - slack)
            done = begin + slack
            passage = self._compare(wanted, ids[first : done + len(wanted) + slack].tolist())
            if passage is not None:
                yield Passage(first + passage[0], first + passage[1], self.names[self._items[probe]])

    def _compare(self, wanted: tuple[int, ...], given: list[int]) -> tuple[int, int] | None:
        """Return where in `given` the words of a probe are, if enough of them are there."""
        there = set(given)
        common = [word for word in wanted if word in there]
        least = SHARE_OF_BITS * self._information(wanted)
        if len(common) < SHARE * len(wanted) or self._information(common) < least:
            return None
        matcher = SequenceMatcher(None, wanted, given, autojunk=False)
        blocks = [block for block in matcher.get_matching_blocks() if block.size]
        matched = [word for block in blocks for word in wanted[block.a : block.a + block.size]]
        if len(matched) < SHARE * len(wanted):
            return None
        exact = len(matched) == len(wanted)
        if not exact and self._information(matched) < max(APPROXIMATE_BITS, least):
            return None
        numbers = sum(word in self._numbers for word in wanted)
        if sum(word in self._numbers for word in matched) < SHARE * numbers:
            return None
        begin, end = blocks[0].b, blocks[-1].b + blocks[-1].size
        density = DENSITY if exact else APPROXIMATE_DENSITY
        return (begin, end) if len(matched) >= density * (end - begin) else None

    def _information(self, ids: Iterable[int]) -> float:
        return sum(self._bits[word] for word in set(ids))


def n_gram_keys(hashed: Keys, size: int) -> Keys:
    """Return a 64-bit key of each n-gram of words, whose hashes are given."""
    factor = np.uint64(0x9E3779B97F4A7C15)
    length, keys = 1, hashed
    for digit in bin(size)[3:]:  # double the length, and add one
        keys = keys[:-length] * factor ** np.uint64(length) + keys[length:]
        length *= 2
        if digit == "1":
            keys = keys[:-1] * factor + hashed[length:]
            length += 1
    return keys


def _windows(length: int) -> Iterator[int]:
    """Yield where the windows of a text begin, evenly spread."""
    count = -(-length // WINDOW)
    for number in range(count):
        yield round(number * (length - WINDOW) / max(1, count - 1)) if count > 1 else 0


def _joined(arrays: Sequence[Ids]) -> Ids:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def _places(lengths: Ids, size: int) -> tuple[Ids, Ids]:
    """Return the text and the offset in it of each n-gram of texts of these lengths."""
    counts = np.maximum(lengths - size + 1, 0)
    number = np.repeat(np.arange(len(lengths)), counts)
    return number, np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)


def _apart(passages: list[Passage]) -> list[Passage]:
    """Join the passages that overlap; the longest names the item."""
    joined: list[Passage] = []
    longest = 0
    for each in sorted(passages, key=lambda passage: (passage.start, passage.end)):
        length = each.end - each.start
        if joined and each.start < joined[-1].end:
            last = joined[-1]
            item = each.item if length > longest else last.item
            joined[-1] = Passage(last.start, max(last.end, each.end), item)
        else:
            joined.append(each)
            longest = 0
        longest = max(longest, length)
    return joined
