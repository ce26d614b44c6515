"""Real text that this machine holds, without duplicates, split by document; nothing is downloaded."""

import csv
import gzip
import hashlib
import importlib.metadata
import json
import random
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.run_folder import Inside
from megatron_blackmamba.study.config import CorpusConfig, StudyError

SOURCES = ("code", "prose")
UNSEEN = "manuals"
"""Manual pages: a source that is validated and never trained on."""
VALIDATION = 0.03
"""Part of the documents of each source."""
SEEN = 0.5
"""A document of which more than this part lies in lines of earlier documents is a near-duplicate."""
SHORTEST_LINE = 20
"""Shorter lines, such as `else:`, prove nothing."""
SIZES = (500, 200_000)
"""Bytes: shorter documents teach little, longer ones are mostly tables."""
DEBIAN = Path("/usr/share/doc")
MANUALS = Path("/usr/share/man")
TEXT = {".md", ".rst", ".txt"}
CODE = {".py", ".h", ".hpp", ".js", ".ts", ".pm", ".vim", ".cmake", ".yml", ".yaml"}
"""Of the folders that a study names."""


@dataclass(frozen=True)
class Corpus:
    """The text of a study and its tokens, in a folder."""

    folder: Path
    config: CorpusConfig

    mixture = Inside("mixture.yaml", "folder")
    record = Inside("corpus.json", "folder")
    text = Inside("text", "folder")

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the sources, the unseen one last."""
        return (*SOURCES, UNSEEN) if self.config.unseen else SOURCES

    def build(self) -> Path:
        """Gather, tokenize and mix, unless an earlier call did; return the mixture file."""
        from megatron_blackmamba.data_tools.bpe import train_or_reuse
        from megatron_blackmamba.data_tools.readers import ReadOptions
        from megatron_blackmamba.data_tools.rejects import Tolerance
        from megatron_blackmamba.data_tools.sources import find_sources
        from megatron_blackmamba.data_tools.tokenization import TokenizeOptions, tokenize

        if self.mixture.is_file():
            return self.mixture
        if not self.record.is_file():
            atomic.write_json(self.record, self.gather())
        inputs = find_sources([str(self.text / source / "train.jsonl") for source in SOURCES], None, None).sources
        read, none = ReadOptions(fields=("text",)), Tolerance.parse("0")
        tokens, vocabulary = self.folder / "tokens", self.config.vocabulary
        tokenizer = train_or_reuse(inputs, tokens, read, none, vocabulary, train_bytes=20_000_000)
        counts, described = json.loads(self.record.read_bytes()), []
        for source in self.sources:
            for part in ("train", "validation"):
                options = TokenizeOptions(tokenizer=str(tokenizer), quiet=True)
                made = tokenize([self.text / source / f"{part}.jsonl"], tokens / source / part, options)
                counts[source][part] |= {"tokens": made.tokens}
            shards = {"shards": f"tokens/{source}/train", "validation": f"tokens/{source}/validation"}
            described.append({"name": source, **shards, "weight": 0.0 if source == UNSEEN else 1.0})
        atomic.write_json(self.record, counts)
        atomic.write_text(self.mixture, yaml.safe_dump({"sources": described}, sort_keys=False))
        return self.mixture

    def gather(self) -> dict[str, dict[str, Any]]:
        """Write `SOURCE/train.jsonl` and `SOURCE/validation.jsonl`; return documents and bytes of each."""
        folders = [Path(folder) for folder in self.config.folders]
        found = {"code": _code(folders), "prose": _prose(folders), UNSEEN: _manuals()}
        lines: set[bytes] = set()
        raw = self.text / "raw"
        for source in self.sources:
            most = self.config.megabytes * 1_000_000 // len(SOURCES)
            _write(raw / f"{source}.jsonl", _distinct(found[source], lines, most))
        if self.config.near_duplicates:
            self._dedup(raw)
        counts = {source: self._split(source, [*_documents(raw / f"{source}.jsonl")]) for source in self.sources}
        shutil.rmtree(raw)
        return counts

    def _split(self, source: str, texts: list[str]) -> dict[str, dict[str, int]]:
        """Write training and validation documents of a source; return how many and how large they are."""
        if len(texts) < 2:
            raise StudyError(f"this machine has no text for the source {source!r}")
        random.Random(0).shuffle(texts)
        held = max(1, round(VALIDATION * len(texts)))
        counts = {}
        for part, some in (("validation", texts[:held]), ("train", texts[held:])):
            _write(self.text / source / f"{part}.jsonl", some)
            counts[part] = {"documents": len(some), "bytes": sum(len(text.encode()) for text in some)}
        return counts

    def _dedup(self, raw: Path) -> None:
        """Remove from the raw files what `blackmamba data dedup` finds to be near-duplicates."""
        out = self.text / "dedup"
        subprocess.run([sys.executable, "-m", "megatron_blackmamba", "data", "dedup", str(raw), str(out)], check=True)
        removed: dict[str, set[int]] = {}
        with open(out / "removed.tsv", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file, delimiter="\t"):
                removed.setdefault(row["file"], set()).add(int(row["record"]))
        for path in raw.glob("*.jsonl"):
            gone = removed.get(path.name, set())
            _write(path, (text for i, text in enumerate([*_documents(path)]) if i not in gone))
        shutil.rmtree(out)


def _write(path: Path, texts: Iterable[str]) -> None:
    """Write documents as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)


def _documents(path: Path) -> Iterator[str]:
    """Yield the documents of a file of JSON lines."""
    with open(path, encoding="utf-8") as file:
        yield from (json.loads(line)["text"] for line in file)


def _distinct(texts: Iterator[str], lines: set[bytes], most: int) -> Iterator[str]:
    """Yield texts of which most is new, up to a number of bytes; `lines` remembers what has been seen."""
    size = 0
    for text in texts:
        hashes = {_hash(line): len(line) for line in map(str.strip, text.splitlines()) if len(line) >= SHORTEST_LINE}
        known = sum(length for digest, length in hashes.items() if digest in lines)
        if not hashes or known > SEEN * sum(hashes.values()):
            continue
        size += len(text.encode())
        if size > most:
            break
        lines.update(hashes)
        yield text


def _hash(line: str) -> bytes:
    return hashlib.blake2b(line.encode(), digest_size=8).digest()


def _code(folders: Sequence[Path]) -> Iterator[str]:
    """Yield Python sources of the standard library, then of installed packages and of folders in a shuffled order."""
    paths = sysconfig.get_paths()
    library, packages = Path(paths["stdlib"]), Path(paths["purelib"])
    yield from _texts(path for path in sorted(library.rglob("*.py")) if packages not in path.parents)
    yield from _texts(_shuffled(packages.rglob("*.py")))
    yield from _texts(_shuffled(path for folder in folders for path in folder.rglob("*") if path.suffix in CODE))


def _prose(folders: Sequence[Path]) -> Iterator[str]:
    """Yield documentation: Python's topics, descriptions and documents of packages, Debian's folder."""
    from pydoc_data.topics import topics

    yield from topics.values()
    for package in sorted(importlib.metadata.distributions(), key=lambda each: each.metadata["Name"] or ""):
        _, _, description = (package.read_text("METADATA") or "").partition("\n\n")
        if SIZES[0] <= len(description) <= SIZES[1]:
            yield description
    for folder in (Path(sysconfig.get_paths()["purelib"]), *folders):
        yield from _texts(_shuffled(path for path in folder.rglob("*") if path.suffix in TEXT))
    if DEBIAN.is_dir():
        yield from _texts(_shuffled(path for path in DEBIAN.rglob("*") if "copyright" not in path.name))


def _manuals() -> Iterator[str]:
    """Yield English manual pages."""
    return _texts(_shuffled(path for path in MANUALS.glob("man*/*")))


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
