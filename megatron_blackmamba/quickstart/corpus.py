"""Real text that every Python installation holds: four sources of different kinds, nothing downloaded."""

import importlib.metadata
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_blackmamba.formats import atomic

HELD_OUT = 0.03
LICENCE = re.compile(r"(licen[cs]e|copying|notice)", re.IGNORECASE)
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "lib2to3", "pydoc_data", "__pycache__", "encodings"}
"""Tests, other people's packages, and tables: thousands of lines alike teach little."""
MOST_BYTES = 12_000_000
"""Of one source: enough for minutes of training, and soon tokenized."""


@dataclass(frozen=True)
class Source:
    name: str
    what: str
    weight: float


SOURCES = (
    Source("code", "the standard library's sources", 1.0),
    Source("topics", "Python's documentation topics", 4.0),
    Source("packages", "the descriptions of installed packages", 1.0),
    Source("licences", "licence texts", 1.0),
)


def gather(folder: Path) -> dict[str, tuple[int, int]]:
    """Write `NAME/train.jsonl` and `NAME/held_out.jsonl` for each source; documents and bytes of each."""
    found = {"code": _code, "topics": _topics, "packages": _packages, "licences": _licences}
    counted = {}
    for source in SOURCES:
        documents = _distinct(found[source.name]())
        random.Random(0).shuffle(documents)
        held_out = max(1, round(HELD_OUT * len(documents)))
        for part, texts in (("held_out", documents[:held_out]), ("train", documents[held_out:])):
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            atomic.write_text(folder / source.name / f"{part}.jsonl", lines)
        counted[source.name] = (len(documents), sum(len(text.encode()) for text in documents))
    return counted


def _distinct(texts: Iterator[str]) -> list[str]:
    """Return the distinct texts, up to MOST_BYTES in total."""
    kept: dict[str, None] = {}
    size = 0
    for text in texts:
        if text.strip() and text not in kept:
            size += len(text.encode())
            if size > MOST_BYTES:
                break
            kept[text] = None
    return list(kept)


def _code() -> Iterator[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if not LEFT_OUT & set(path.relative_to(library).parts):
            yield from _text_of(path)


def _topics() -> Iterator[str]:
    from pydoc_data.topics import topics

    yield from topics.values()


def _packages() -> Iterator[str]:
    for package in _installed():
        _, _, description = (package.read_text("METADATA") or "").partition("\n\n")
        yield description


def _licences() -> Iterator[str]:
    for package in _installed():
        for file in package.files or []:
            if LICENCE.search(file.name) and file.suffix in ("", ".txt", ".md", ".rst"):
                yield from _text_of(Path(str(package.locate_file(file))))


def _installed() -> list[importlib.metadata.Distribution]:
    return sorted(importlib.metadata.distributions(), key=lambda package: package.metadata["Name"] or "")


def _text_of(path: Path) -> Iterator[str]:
    try:
        yield path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return  # a file of another encoding, or gone: this corpus takes what is easily had
