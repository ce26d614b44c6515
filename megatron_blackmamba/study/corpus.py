"""The text of a study, without duplicates, split by document and tokenized."""

import csv
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.remote import file_sha256
from megatron_blackmamba.formats.run_folder import Inside
from megatron_blackmamba.study.config import CorpusConfig, StudyError, here_or_shipped
from megatron_blackmamba.study.machine import Machine
from megatron_blackmamba.study.packages import Packages, download
from megatron_blackmamba.study.texts import digest

SOURCES = ("code", "prose")
"""What is trained on; any other source is validated alone."""
VALIDATION = 0.03
"""Part of the documents of each source."""
SEEN = 0.5
"""A document of which more than this part lies in lines of earlier documents is a near-duplicate."""
SHORTEST_LINE = 20
"""Shorter lines, such as `else:`, prove nothing."""


@dataclass(frozen=True)
class Corpus:
    """The text of a study and its tokens, in a folder."""

    folder: Path
    config: CorpusConfig

    mixture = Inside("mixture.yaml", "folder")
    record = Inside("corpus.json", "folder")
    text = Inside("text", "folder")
    wheels = Inside("wheels", "folder")

    @property
    def origin(self) -> Machine | Packages:
        """Return where the text comes from."""
        if self.config.packages is not None:
            return Packages(self.wheels)
        return Machine(tuple(Path(folder) for folder in self.config.folders))

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the sources, the unseen one last."""
        return (*SOURCES, self.origin.unseen) if self.config.unseen else SOURCES

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
            counts[source]["weight"] = self.config.weights.get(source, 1.0) if source in SOURCES else 0.0
            described.append({"name": source, **shards, "weight": counts[source]["weight"]})
        atomic.write_json(self.record, counts)
        atomic.write_text(self.mixture, yaml.safe_dump({"sources": described}, sort_keys=False))
        return self.mixture

    def gather(self) -> dict[str, dict[str, Any]]:
        """Write `SOURCE/train.jsonl` and `SOURCE/validation.jsonl`; return documents and bytes of each."""
        origin = self.origin
        if (pins := self.config.packages) is not None:
            download(here_or_shipped(pins, pins), self.wheels)
        texts = (origin.code(), origin.prose(), origin.other())
        lines: set[bytes] = set()
        raw = self.text / "raw"
        for source, found in zip(self.sources, texts, strict=False):
            most = self.config.megabytes * 1_000_000 // len(SOURCES)
            _write(raw / f"{source}.jsonl", _distinct(found, lines, most))
        if self.config.near_duplicates:
            self._dedup(raw)
        counts = {source: self._split(source, [*_documents(raw / f"{source}.jsonl")]) for source in self.sources}
        shutil.rmtree(raw)
        shutil.rmtree(self.wheels, ignore_errors=True)
        return counts

    def _split(self, source: str, texts: list[str]) -> dict[str, Any]:
        """Write training and validation documents of a source; return how many and how large they are."""
        if len(texts) < 2:
            raise StudyError(f"this machine has no text for the source {source!r}")
        random.Random(0).shuffle(texts)
        held = max(1, round(VALIDATION * len(texts)))
        counts = {}
        for part, some in (("validation", texts[:held]), ("train", texts[held:])):
            written = self.text / source / f"{part}.jsonl"
            _write(written, some)
            size = sum(len(text.encode()) for text in some)
            counts[part] = {"documents": len(some), "bytes": size, "sha256": file_sha256(written)}
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
        hashes = {digest(line): len(line) for line in map(str.strip, text.splitlines()) if len(line) >= SHORTEST_LINE}
        known = sum(length for each, length in hashes.items() if each in lines)
        if not hashes or known > SEEN * sum(hashes.values()):
            continue
        size += len(text.encode())
        if size > most:
            break
        lines.update(hashes)
        yield text
