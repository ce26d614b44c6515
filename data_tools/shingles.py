"""The shingles of a document: its distinct n-grams of words, or of characters where a language has no spaces."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash
from datatrove.utils.text import TextNormConfig, simplify_text

_DENSE = r"㐀-䶿一-鿿豈-﫿\U00020000-\U0003ffff぀-ヿㇰ-ㇿ"
"""Characters that are words, or nearly: Chinese, and the Japanese syllables."""
_LONG = r"฀-๿຀-໿ༀ-࿿က-႟ក-៿"
"""Letters of Thai, Lao, Tibetan, Burmese and Khmer, which write words of several letters without spaces."""
_SPACELESS = re.compile(f"[{_DENSE}{_LONG}]")
_LONG_LETTER = re.compile(f"[{_LONG}]")
_PIECE = re.compile(rf"[{_DENSE}{_LONG}]|[^\s{_DENSE}{_LONG}]+")
SPACELESS_SHARE = 0.3
"""A document is cut into characters from this share of such characters on, among those that are not white space."""
_DENSE_MORE, _LONG_MORE = 1, 3
"""Characters of a shingle beyond --n-grams."""
LEAST_REMAINING = 0.1
"""A document keeps its repeated lines if less than this share of it would remain."""
LONG_TEXT = 100
"""Characters from which on a text with too few words for a shingle is one itself, as a sequence of DNA is."""
_NORM = TextNormConfig(norm_numbers=False)
"""Numbers count as they are: two tables of different numbers are different documents."""


class Shingler:
    """A splitter of texts into hashed shingles."""

    def __init__(self, n_grams: int, words: Any, repeated: np.ndarray | None = None) -> None:
        """Set up the splitter.

        Args:
            words: datatrove's word tokenizer, for languages with spaces.
            repeated: Sorted hashes of the lines that are left out.
        """
        self.n_grams, self.words, self.repeated = n_grams, words, repeated

    def __call__(self, text: str) -> np.ndarray:
        """Return the sorted distinct shingles of a text as 32-bit hashes."""
        if self.repeated is not None and len(self.repeated):
            text = without_lines(text, self.repeated)
        simple = simplify_text(text, _NORM)
        spaceless = len(_SPACELESS.findall(simple))
        if spaceless > SPACELESS_SHARE * (len(simple) - simple.count(" ")):
            long = len(_LONG_LETTER.findall(simple)) > spaceless / 2
            words, size = _PIECE.findall(simple), self.n_grams + (_LONG_MORE if long else _DENSE_MORE)
        else:
            words, size = self.words.word_tokenize(simple), self.n_grams
        grams = set(map(" ".join, zip(*(words[start:] for start in range(size)), strict=False)))
        if not grams and len(simple) >= LONG_TEXT:
            grams = {simple}
        return np.unique(np.fromiter(map(xxhash.xxh32_intdigest, grams), np.uint32, len(grams)))


def without_lines(text: str, repeated: np.ndarray) -> str:
    """Return a text without the lines of these sorted hashes; all of it where too little would remain."""
    lines = text.split("\n")
    keys = np.array([line_key(line) for line in lines], np.uint64)
    places = np.minimum(np.searchsorted(repeated, keys), len(repeated) - 1)
    kept = [line for line, left_out in zip(lines, repeated[places] == keys, strict=True) if not left_out]
    shorter = "\n".join(kept)
    return shorter if len(shorter) >= LEAST_REMAINING * len(text) else text


def line_key(line: str) -> int:
    """Return the hash of a line without the spaces around it."""
    return xxhash.xxh64_intdigest(line.strip())


def line_keys(text: str) -> Iterator[int]:
    """Yield the hashes of the distinct lines of a text that hold a letter or a number."""
    for line in {line.strip() for line in text.split("\n")}:
        if any(map(str.isalnum, line)):
            yield line_key(line)


def jaccard(one: np.ndarray, other: np.ndarray, most: int) -> float:
    """Return the Jaccard similarity of two sorted sets of hashes, of each the `most` smallest at most.

    It is exact if no set was cut, else an estimate from the `most` smallest hashes of both together.
    """
    together = np.sort(np.concatenate((one, other)))
    again = together[1:] == together[:-1]
    if len(one) < most and len(other) < most:
        common = int(again.sum())
        return common / (len(together) - common) if len(together) else 0.0
    first = np.flatnonzero(np.concatenate(([True], ~again)))  # of each distinct hash
    end = first[most] if len(first) > most else len(together)
    return int(again[: max(end - 1, 0)].sum()) / min(most, len(first))
