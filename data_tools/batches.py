"""Batches of documents, as every reader of raw files yields them, and the options of reading."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron_blackmamba.data_tools.rejects import InputError

Rejecter = Callable[[int, str, str], None]  # record number, reason, detail
BATCH_BYTES = 1 << 20  # what one step works on stays in the cache of a core
LONGEST_RECORD = 2 << 30
"""Most bytes of a record: a small file may decompress to one that memory cannot hold."""


@dataclass(frozen=True)
class ReadOptions:
    """Options that select the text of a document in a file."""

    fields: tuple[str, ...] = ("text",)
    joiner: str = "\n\n"
    marker: str | None = None
    encoding: str | None = None
    """Of JSON Lines and text; without one, UTF-8."""
    keep: bool = False
    """Whether batches have the other fields of the records too."""

    def __post_init__(self) -> None:
        if not self.fields or not all(self.fields):
            raise InputError("--field needs the name of a field")
        if self.marker == "":
            raise InputError("--marker needs some text to split on")


@dataclass
class Batch:
    """Documents in the order of the file, each with its record number counted from 1."""

    texts: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    rests: list[dict[str, Any]] = field(default_factory=list)
    """The other fields of each record; empty if they are not kept, or there are no records."""

    def add(self, number: int, text: str) -> None:
        self.texts.append(text)
        self.numbers.append(number)

    def chosen(self, places: Iterable[int]) -> "Batch":
        """Return the documents at some places, without their other fields."""
        places = list(places)
        return Batch([self.texts[i] for i in places], [self.numbers[i] for i in places])
