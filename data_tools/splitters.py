"""Word splitters of datatrove by language, and the plain one that needs no other package."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

try:
    from datatrove.utils.word_tokenizers import WordTokenizer, load_word_tokenizer
except ImportError:  # said by `require_datatrove`
    WordTokenizer = object

from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.words import SplitWords, split_words


class SpacedWords(WordTokenizer):
    """A word splitter at spaces, after datatrove has removed punctuation; datatrove's own one needs spaCy."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        raise NotImplementedError

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        raise NotImplementedError


def words_of(language: str | None) -> Any:
    """Return the word splitter of a language, or refuse one that is unknown or not installed."""
    if language is None:
        return SpacedWords()  # datatrove has taken the punctuation out
    try:
        splitter = load_word_tokenizer(language)
        splitter.word_tokenize("a text")
    except (ImportError, OSError, LookupError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise InputError(
            f"--language {language}: its word splitter is not installed: {why}. Install it, or leave out --language"
        ) from None
    except ValueError:
        raise InputError(
            f"--language {language}: datatrove has no word splitter for it. Give a code such as eng, or leave it out"
        ) from None
    return splitter


class _WordSplitter:
    """datatrove's word splitter of a language, loaded by the process that uses it."""

    def __init__(self, language: str) -> None:
        self.language = language

    def __call__(self, text: str) -> Sequence[str]:
        from datatrove.utils.word_tokenizers import load_word_tokenizer  # cached there

        return [word for word in load_word_tokenizer(self.language).word_tokenize(text) if any(map(str.isalnum, word))]


def word_splitter(language: str | None) -> SplitWords:
    """Return datatrove's word splitter of a language, or without one that of every text."""
    return split_words if language is None else _WordSplitter(language)


class PlainWords(WordTokenizer):
    """Words, numbers and single marks, for datatrove's filters; sentences end with a mark and a space.

    It stands in for datatrove's splitter of English, which needs spaCy.
    """

    _WORD = re.compile(r"\w+(?:['’.\-/@]\w+)*|\.{3,}|[^\w\s]")
    _END = re.compile(r"[.!?…。！？]+[\"'”’)\]]*")

    def word_tokenize(self, text: str) -> list[str]:
        return self._WORD.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        return [text[begin:end].strip() for begin, end in self.span_tokenize(text)]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        ends = [found.end() for found in self._END.finditer(text) if text[found.end() : found.end() + 1].strip() == ""]
        rest = max(0, len(text) - text.endswith("\n"))
        cuts = sorted({0, *ends, rest, len(text)})
        return [(begin, end) for begin, end in pairwise(cuts) if text[begin:end].strip()]
