"""Real text that this machine holds, without duplicates, split by document; nothing is downloaded."""

import gzip
import hashlib
import importlib.metadata
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import yaml

from megatron_blackmamba.formats import atomic
from megatron_blackmamba.study.config import StudyError

SOURCES = ("code", "prose")
VALIDATION = 0.03
"""Part of the documents of each source."""
SEEN = 0.5
"""A document of which more than this part lies in lines of earlier documents is a near-duplicate."""
SHORTEST_LINE = 20
"""Shorter lines, such as `else:`, prove nothing."""
SIZES = (500, 200_000)
"""Bytes: shorter documents teach little, longer ones are mostly tables."""
DEBIAN = Path("/usr/share/doc")
TEXT = {".md", ".rst", ".txt"}


def gather(folder: Path, megabytes: int) -> dict[str, dict[str, int]]:
    """Write `SOURCE/train.jsonl` and `SOURCE/validation.jsonl`; return documents, bytes and duplicates of each."""
    found = {"code": _code, "prose": _prose}
    lines: set[bytes] = set()
    counts = {}
    for source in SOURCES:
        kept, duplicates = _distinct(found[source](), lines, megabytes * 1_000_000 // len(SOURCES))
        if len(kept) < 2:
            raise StudyError(f"this machine has no text for the source {source!r}")
        random.Random(0).shuffle(kept)
        held = max(1, round(VALIDATION * len(kept)))
        for part, texts in (("validation", kept[:held]), ("train", kept[held:])):
            content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            atomic.write_text(folder / source / f"{part}.jsonl", content)
        size = sum(len(text.encode()) for text in kept)
        counts[source] = {"documents": len(kept), "bytes": size, "duplicates": duplicates}
    return counts


def build(folder: Path, megabytes: int, vocabulary: int) -> Path:
    """Gather, tokenize and mix, unless an earlier call did; return the mixture file."""
    from megatron_blackmamba.data_tools.bpe import train_or_reuse
    from megatron_blackmamba.data_tools.readers import ReadOptions
    from megatron_blackmamba.data_tools.rejects import Tolerance
    from megatron_blackmamba.data_tools.sources import find_sources
    from megatron_blackmamba.data_tools.tokenization import TokenizeOptions, tokenize

    mixture, record = folder / "mixture.yaml", folder / "corpus.json"
    if mixture.is_file():
        return mixture
    if not record.is_file():
        atomic.write_json(record, gather(folder / "text", megabytes))
    texts = {source: folder / "text" / source for source in SOURCES}
    inputs = find_sources([str(text / "train.jsonl") for text in texts.values()], None, None).sources
    read, none = ReadOptions(fields=("text",)), Tolerance.parse("0")
    tokenizer = train_or_reuse(inputs, folder / "tokens", read, none, vocabulary, train_bytes=20_000_000)
    described = []
    for source, text in texts.items():
        for part in ("train", "validation"):
            options = TokenizeOptions(tokenizer=str(tokenizer), quiet=True)
            tokenize([text / f"{part}.jsonl"], folder / "tokens" / source / part, options)
        shards = {"shards": f"tokens/{source}/train", "validation": f"tokens/{source}/validation"}
        described.append({"name": source, **shards, "weight": 1.0})
    atomic.write_text(mixture, yaml.safe_dump({"sources": described}, sort_keys=False))
    return mixture


def _distinct(texts: Iterator[str], lines: set[bytes], most: int) -> tuple[list[str], int]:
    """Return texts of which most is new, and how many were not; `lines` remembers what has been seen."""
    kept: list[str] = []
    duplicates = size = 0
    for text in texts:
        hashes = {_hash(line): len(line) for line in map(str.strip, text.splitlines()) if len(line) >= SHORTEST_LINE}
        known = sum(length for digest, length in hashes.items() if digest in lines)
        if not hashes or known > SEEN * sum(hashes.values()):
            duplicates += 1
            continue
        size += len(text.encode())
        if size > most:
            break
        lines.update(hashes)
        kept.append(text)
    return kept, duplicates


def _hash(line: str) -> bytes:
    return hashlib.blake2b(line.encode(), digest_size=8).digest()


def _code() -> Iterator[str]:
    """Yield Python sources of the standard library, then of installed packages in a shuffled order."""
    paths = sysconfig.get_paths()
    library, packages = Path(paths["stdlib"]), Path(paths["purelib"])
    yield from _texts(path for path in sorted(library.rglob("*.py")) if packages not in path.parents)
    yield from _texts(_shuffled(packages.rglob("*.py")))


def _prose() -> Iterator[str]:
    """Yield documentation: Python's topics, descriptions and documents of packages, Debian's folder."""
    from pydoc_data.topics import topics

    yield from topics.values()
    for package in sorted(importlib.metadata.distributions(), key=lambda each: each.metadata["Name"] or ""):
        _, _, description = (package.read_text("METADATA") or "").partition("\n\n")
        if SIZES[0] <= len(description) <= SIZES[1]:
            yield description
    packages = Path(sysconfig.get_paths()["purelib"])
    yield from _texts(_shuffled(path for path in packages.rglob("*") if path.suffix in TEXT))
    if DEBIAN.is_dir():
        yield from _texts(_shuffled(path for path in DEBIAN.rglob("*") if "copyright" not in path.name))


def _shuffled(paths: Iterator[Path]) -> list[Path]:
    """Order paths by a hash, so that a limit cuts no subject off."""
    return sorted(paths, key=lambda path: _hash(str(path)))


def _texts(paths: Iterator[Path] | list[Path]) -> Iterator[str]:
    """Yield the files that are text of a useful size."""
    for path in paths:
        try:
            if not path.is_file() or path.stat().st_size > SIZES[1]:
                continue
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            text = content.decode("utf-8")
        except (OSError, EOFError, ValueError):
            continue  # another encoding, damaged, or gone: this corpus takes what is easily had
        if SIZES[0] <= len(content) <= SIZES[1] and "\0" not in text:
            yield text
