"""The steps of a cleaning: raw files as datatrove documents, cleaned parts, and the list of removals."""

import contextlib
import csv
import io
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import zstandard

try:
    from datatrove.data import Document
    from datatrove.pipeline.base import PipelineStep
except ImportError:  # said by `require_datatrove`
    Document = Any
    PipelineStep = object

from megatron_blackmamba.data_tools.batches import Batch
from megatron_blackmamba.data_tools.cleaning import READ, Cleaning, Stage
from megatron_blackmamba.data_tools.origins import COLUMNS, REMOVED, CleaningManifest, Cleanings, Part, part_of
from megatron_blackmamba.data_tools.other_fields import beside, line, origin_of
from megatron_blackmamba.data_tools.readers import Reader
from megatron_blackmamba.data_tools.rejects import EMPTY, InputError, RejectLog
from megatron_blackmamba.data_tools.sources import Source
from megatron_blackmamba.formats import atomic, leftovers
from megatron_blackmamba.formats.remote import file_sha256, is_remote
from megatron_blackmamba.formats.shards import RawFile

Note = Callable[[Any], dict[str, Any] | None]
"""Returns what to note of a document."""
Row = tuple[str, int, str, str, str]
ADDED = "added"
"""The metadata of a document that are further fields of its record in the part."""
ORIGIN, REST = "origin", "rest"
"""The metadata that are the raw file and record of a document, and its other fields."""
_LEVEL = 3
_TELL_EVERY = 1.0
"""Seconds between updates of what a task has read."""
_SAMPLED_FILES = 64


def part_name(rank: int) -> str:
    """Return the name of the part that a task writes."""
    return f"part_{rank + 1:05d}.jsonl.zst"


class RawDocuments(PipelineStep):
    """A datatrove reader of everything that `tokenize` reads. Part number `rank` is read by task `rank`."""

    type = "📖 - READER"
    name = "raw documents"

    def __init__(self, cleaning: Cleaning, stage: str, *, noted: bool = True) -> None:
        """Set up the step; with `noted`, records that do not become documents are noted, and the files read."""
        super().__init__()
        self.cleaning, self.noted = cleaning, noted
        self.progress = cleaning.work / stage / READ

    def run(self, data: Any, rank: int, world_size: int) -> Iterator[Any]:
        """Yield the documents of one part; `metadata` holds the raw file, the record and its other fields."""
        if not self.noted:
            yield from self._documents(rank, io.BytesIO())
            return
        with atomic.atomic_file(self.cleaning.notes / f"{rank:05d}.skipped") as notes:
            raw = yield from self._documents(rank, notes)
        atomic.write_json(self.cleaning.notes / f"{rank:05d}.raw", raw)

    def _documents(self, rank: int, notes: Any) -> Generator[Any, None, list[dict[str, Any]]]:
        options = replace(self.cleaning.read, keep=True)  # in every stage, so that all take the same records
        log = RejectLog(self.cleaning.tolerance, unit="part", listed_in=REMOVED)
        parent, records = os.getppid(), 0

        def note(source: Source, record: int, reason: str, detail: str) -> None:
            notes.write(line({"file": source.name, "record": record, "reason": reason, "detail": detail}))

        def reject(source: Source, *bad: Any) -> None:
            log.add(source.name, source.path, *bad)
            note(source, *bad)

        raw: list[dict[str, Any]] = []
        cleanings, read, told = Cleanings(), 0, -_TELL_EVERY
        for source in self.cleaning.parts[rank]:
            cleaned = cleanings.is_part(source.path)
            reader = Reader(source.path, source.format, options, partial(reject, source))
            for batch in reader.batches():
                if os.getppid() != parent:
                    raise InputError("the program that started this task has ended")
                records += len(batch.texts)
                if time.monotonic() - told > _TELL_EVERY:
                    told = time.monotonic()
                    self._tell(rank, read + reader.bytes_read)
                for document in _documents_in(batch, source, cleaned):
                    if not document.text:
                        note(source, document.metadata["record"], EMPTY, "the text has no character")
                        continue
                    self.stat_update("documents")
                    yield document
            _refuse_changed(source, reader)
            read += reader.bytes_read
            origins = cleanings.origins_of(source.path, reader.sha256, reader.unpacked_sha256)
            behind = [each.model_dump() for each in origins]
            raw.append({"name": source.name, "sha256": reader.sha256, "origins": behind})
        log.check(records + log.total)
        return raw

    def _tell(self, rank: int, read: int) -> None:
        if self.cleaning.options.slurm is None:  # else nobody looks
            with contextlib.suppress(OSError):
                atomic.write_text(self.progress / f"{rank:05d}", str(read))


def reading(
    cleaning: Cleaning, name: str, *steps: Any, noted: bool = True, before: Sequence[Stage] = (), cost: float = 1.0
) -> Stage:
    """Return a stage whose steps take the raw documents, one part a task."""
    first = RawDocuments(cleaning, name, noted=noted)
    return cleaning.stage(name, [first, *steps], len(cleaning.parts), before, cost=cost)


def _documents_in(batch: Batch, source: Source, cleaned: bool) -> Iterator[Any]:
    rests: Iterable[dict[str, Any]] = batch.rests or repeat({})
    for number, text, rest in zip(batch.numbers, batch.texts, rests, strict=bool(batch.rests)):
        where = {"file": source.name, "record": number}
        origin = (origin_of(rest) if cleaned else {}) or where
        yield Document(text, f"{source.name}/{number}", metadata={**where, ORIGIN: origin, REST: rest})


def first_documents(cleaning: Cleaning, most: int) -> Iterator[Any]:
    """Yield the first documents of up to 64 files, in equal numbers as far as the files have them."""
    sources = [source for part in cleaning.parts for source in part]
    some = sources[:: max(1, -(-len(sources) // _SAMPLED_FILES))]
    options = replace(cleaning.read, keep=True)
    for place, source in enumerate(some):
        quota = -(-most // (len(some) - place))
        reader = Reader(source.path, source.format, options, lambda *_: None)
        cleaned = Cleanings().is_part(source.path)
        documents = chain.from_iterable(_documents_in(batch, source, cleaned) for batch in reader.batches())
        for document in islice((each for each in documents if each.text), quota):
            yield document
            most -= 1


def _refuse_changed(source: Source, reader: Reader) -> None:
    """Refuse a file that changed after the work was planned: the stages count its documents to find them again."""
    changed = not is_remote(source.path) and os.stat(source.path).st_mtime_ns != source.modified_ns
    if changed or reader.bytes_read != source.bytes:
        raise InputError(f"{source.path}: changed while this ran. Clean again into another folder once it is complete")


class PartWriter(PipelineStep):
    """A writer of the kept documents as `part_00001.jsonl.zst`; the file appears when it is complete.

    A part without documents leaves no file: pyarrow refuses to read a JSON file without a line.
    """

    type = "💽 - WRITER"
    name = "part"

    def __init__(self, cleaning: Cleaning, folder: Path | None = None) -> None:
        """Set up the step; `folder` is another place for the parts than the output folder."""
        super().__init__()
        self.folder, self.notes = folder or cleaning.out_dir, cleaning.notes

    def run(self, data: Any, rank: int, world_size: int) -> None:
        kept: Counter[str] = Counter()
        cut = 0
        path = self.folder / part_name(rank)
        leftovers.tidy(path)
        with (
            atomic.atomic_file(path) as file,
            zstandard.ZstdCompressor(level=_LEVEL).stream_writer(file, closefd=False) as out,
        ):
            for document in data:
                where = _where(document)
                added = document.metadata.get(ADDED, {})
                cut += "cut" in added
                ours = {"text": document.text, **document.metadata[ORIGIN], **added}
                out.write(line(beside(ours, document.metadata[REST])))
                kept[where["file"]] += 1
        written = {
            "name": path.name,
            "sha256": file_sha256(path),
            "bytes": path.stat().st_size,
            "kept": kept,
            "cut": cut,
        }
        if not kept:
            path.unlink()
        atomic.write_json(self.notes / f"{rank:05d}.part", written)


class RemovalLog:
    """A log of the documents removed from a part; datatrove's filters use it as their exclusion writer."""

    def __init__(self, notes: Path, note: Note) -> None:
        self.notes, self.note = notes, note
        self._file: Any = None

    def __enter__(self) -> "RemovalLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, document: Any, rank: int = 0, **_: Any) -> None:
        if self._file is None:
            self.notes.mkdir(parents=True, exist_ok=True)
            self._file = open(self.notes / f"{rank:05d}.removed", "wb")  # noqa: SIM115
        self._file.write(line({**_where(document), **(self.note(document) or {})}))


def _where(document: Any) -> dict[str, Any]:
    return {key: document.metadata[key] for key in ("file", "record")}


def read_notes(folder: Path, suffix: str) -> Iterator[dict[str, Any]]:
    """Yield the notes of all parts in order."""
    for path in sorted(folder.glob(f"*.{suffix}")):
        with open(path, "rb") as file:
            yield from map(json.loads, file)


class Listing(PipelineStep):
    """The last stage: the list of the removed documents, then of the records that were skipped; and the counts."""

    type = "📋 - LIST"
    name = "removals"

    def __init__(
        self,
        cleaning: Cleaning,
        rows: Callable[[Path], Iterator[Row]],
        spent: Sequence[Path] = (),
        cut: Callable[[Path], Iterator[Row]] = lambda _: iter(()),
    ) -> None:
        """Set up the step.

        Args:
            rows: From the folder of the notes: the rows of the removed documents.
            spent: Folders as large as the text, which nothing reads again.
            cut: As `rows`, of the passages that were cut out of documents.
        """
        super().__init__()
        self.cleaning, self.rows, self.spent, self.cut = cleaning, rows, spent, cut

    def run(self, data: Any, rank: int, world_size: int) -> None:
        out_dir, notes = self.cleaning.out_dir, self.cleaning.notes
        counts: Counter[str] = Counter(removed=0, skipped=0)
        with atomic.atomic_file(out_dir / REMOVED) as file:
            text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
            table = csv.writer(text, delimiter="\t", lineterminator="\n")
            table.writerow(COLUMNS)
            for kind, rows in (("removed", self.rows(notes)), ("cut", self.cut(notes)), ("skipped", _skipped(notes))):
                for row in rows:
                    table.writerow(row)
                    counts[kind] += 1
            text.detach()
        parts = [_described(path) for path in sorted(notes.glob("*.part"))]
        if len(parts) < len([*notes.glob("*.skipped")]):
            raise InputError(f"{out_dir}: an older version began this. Remove the folder, and run the command again")
        CleaningManifest(parts=[part for part in parts if part.documents]).write(out_dir)
        atomic.write_json(
            self.cleaning.done, {"kept": sum(part.documents for part in parts), **counts, **self.facts(notes)}
        )
        for folder in self.spent:
            shutil.rmtree(folder, ignore_errors=True)

    def facts(self, notes: Path) -> dict[str, Any]:
        """Return further results, from the folder of the notes."""
        return {}


def _skipped(notes: Path) -> Iterator[Row]:
    for note in read_notes(notes, "skipped"):
        yield note["file"], note["record"], note["reason"], "", note["detail"]


def _described(notes: Path) -> Part:
    """Return a part's entry in the manifest: its raw files are those that gave it documents."""
    written, read = json.loads(notes.read_bytes()), json.loads(notes.with_suffix(".raw").read_bytes())
    files = [
        (RawFile(name=raw["name"], sha256=raw["sha256"]), [RawFile(**each) for each in raw["origins"]])
        for raw in read
        if raw["name"] in written["kept"]
    ]
    kept = sum(written["kept"].values())
    return part_of(written["name"], written["sha256"], written["bytes"], kept, files, written.get("cut") or None)
