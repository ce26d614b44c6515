"""Documents that hold evaluation items, removed with datatrove's n-gram filter."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

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
from megatron_blackmamba.data_tools.evaluation_items import Item
from megatron_blackmamba.data_tools.rejects import InputError

try:
    from datatrove.pipeline.decont import NGramsDecontConfig, NGramsDecontFilter
    from datatrove.utils.text import ngrams, simplify_text
except ImportError:  # said by `require_datatrove`
    NGramsDecontFilter = object

FEWEST_WORDS = 4
"""Texts of fewer words are everywhere: they are not looked for."""


class ItemIndex:
    """The n-grams of the items' texts, and the shorter texts as a whole."""

    def __init__(self, items: Iterable[Item], n_grams: int, language: str | None = None) -> None:
        if n_grams <= FEWEST_WORDS:
            raise InputError(f"--n-grams {n_grams}: at least {FEWEST_WORDS + 1}")
        self.config = NGramsDecontConfig(n_grams=n_grams)
        self.words: Any = language or SpacedWords()
        finder = NGramsDecontFilter(".", self.config, language=self.words)
        self.items = 0
        self.hashes: dict[int, str] = {}
        """The item of every n-gram, by its hash."""
        self.short: dict[tuple[str, ...], dict[tuple[str, ...], str]] = {}
        """Texts shorter than an n-gram and their items, by their first words."""
        self.too_short = 0
        for item in items:
            self.items += 1
            texts = [
                finder.tokenizer.word_tokenize(simplify_text(text, self.config.norm_config)) for text in item.texts
            ]
            self.too_short += all(len(words) < FEWEST_WORDS for words in texts)
            for words in texts:
                self._add(words, item.name, finder)
        if self.too_short == self.items:
            raise InputError(
                f"--against: each of its {self.items} items has fewer than {FEWEST_WORDS} words, too few to look for. "
                "Name other tasks or files"
            )

    def _add(self, words: list[str], item: str, finder: Any) -> None:
        if len(words) >= self.config.n_grams:
            for gram in ngrams(words, self.config.n_grams):
                self.hashes.setdefault(finder.hash_func(" ".join(gram)), item)
        elif len(words) >= FEWEST_WORDS:
            self.short.setdefault(tuple(words[:FEWEST_WORDS]), {}).setdefault(tuple(words), item)


class _Filter(NGramsDecontFilter):
    """datatrove's filter; it also finds items that are shorter than an n-gram, and knows the item of a match."""

    def __init__(self, index: ItemIndex, log: RemovalLog) -> None:
        super().__init__(".", index.config, exclusion_writer=log, language=index.words)
        self.index = index

    def load_index_hashes(self) -> None:
        self._index_hashes = self.index.hashes

    def filter(self, doc: Any) -> bool | tuple[bool, str]:
        words = self.tokenizer.word_tokenize(simplify_text(doc.text, self.config.norm_config))
        for at, start in enumerate(ngrams(words, FEWEST_WORDS)):
            for text, item in self.index.short.get(start, {}).items():
                if tuple(words[at : at + len(text)]) == text:
                    doc.metadata["contaminated_ngram"], doc.metadata["contaminated_task"] = " ".join(text), item
                    return False, "contaminated"
        return super().filter(doc)

    def stat_update(self, *labels: str, **more: Any) -> None:
        """Count without a statistic for every item."""
        super().stat_update(*(label for label in labels if not label.startswith("contaminated_")), **more)


def stages(cleaning: Cleaning, index: ItemIndex) -> list[Any]:
    """Return the executors of both stages in order."""
    drop = _Filter(index, RemovalLog(cleaning.notes, _found))
    steps = [RawDocuments(cleaning), drop, PartWriter(cleaning)]
    first = cleaning.executor("1_documents", steps, len(cleaning.parts))
    return [first, cleaning.executor("2_removals", [Listing(cleaning, _rows)], 1, first)]


def _found(document: Any) -> dict[str, Any]:
    return {"item": document.metadata["contaminated_task"], "words": document.metadata["contaminated_ngram"]}


def _rows(notes: Path) -> Iterator[Row]:
    for note in read_notes(notes, "removed"):
        yield note["file"], note["record"], "evaluation item", note["item"], note["words"]
