"""Raw files as datatrove documents, cleaned parts, and the list of removals: for deduplication and decontamination.

The work is cut into parts as `tokenize` cuts it into shards, and a part is a task of datatrove's executors: it reads
some raw files and writes `part_00001.jsonl.zst`. A task that is done leaves a marker, so a second call does the rest.
"""

import contextlib
import csv
import fcntl
import io
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import zstandard

try:
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
    from datatrove.executor.base import PipelineExecutor
    from datatrove.pipeline.base import PipelineStep
    from datatrove.utils.word_tokenizers import WordTokenizer
    from loguru import logger
    from multiprocess import resource_tracker
    from multiprocess.util import get_temp_dir, register_after_fork
except ImportError:  # said by `require_datatrove`
    Document = Any
    LocalPipelineExecutor = SlurmPipelineExecutor = PipelineExecutor = PipelineStep = WordTokenizer = object

from megatron_blackmamba import interrupts
from megatron_blackmamba.data_tools.batches import ReadOptions
from megatron_blackmamba.data_tools.cleaning_jobs import JOBS, record_job, refuse_unfinished_jobs
from megatron_blackmamba.data_tools.origins import DONE, SETTINGS, WORK, CleaningManifest, Cleanings, Part, part_of
from megatron_blackmamba.data_tools.readers import Reader
from megatron_blackmamba.data_tools.rejects import EMPTY, InputError, RejectLog, Tolerance
from megatron_blackmamba.data_tools.sources import Source
from megatron_blackmamba.data_tools.streams import file_sha256
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.remote import is_remote
from megatron_blackmamba.formats.shards import RawFile

REMOVED = "removed.tsv"
COLUMNS = ("file", "record", "reason", "resembles", "detail")
_LEVEL = 3


def part_name(rank: int) -> str:
    """Return the name of the part that a task writes."""
    return f"part_{rank + 1:05d}.jsonl.zst"


@dataclass(frozen=True)
class Slurm:
    """The Slurm partition and limits for tasks that do not run on this machine."""

    partition: str
    time: str = "12:00:00"
    memory_gb: int = 4


@dataclass(frozen=True)
class Cleaning:
    """One deduplication or decontamination: the parts, the output folder, and how the tasks run."""

    name: str
    parts: Sequence[Sequence[Source]]
    out_dir: Path
    read: ReadOptions
    tolerance: Tolerance
    workers: int
    settings: dict[str, Any]
    slurm: Slurm | None = None

    @property
    def work(self) -> Path:
        """Return the folder for intermediate files, logs and markers."""
        return self.out_dir / WORK / self.name

    @property
    def done(self) -> Path:
        return self.work / DONE

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the output folder, or refuse it while another command or a Slurm job works in it."""
        path = self.out_dir / WORK / "lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with this process, and is not its children's
            except (BlockingIOError, PermissionError):
                raise InputError(f"{self.out_dir}: another command works in this folder now. Let it finish") from None
            except OSError:
                pass  # a file system without locks
            if not self.done.exists():
                refuse_unfinished_jobs(path.parent)
            yield

    def refuse_other_settings(self) -> None:
        """Refuse to continue the work of a call with other inputs or options."""
        inputs = [[source.name, source.bytes, source.modified_ns] for part in self.parts for source in part]
        wanted = json.loads(json.dumps({**self.settings, "parts": len(self.parts), "inputs": inputs}))
        path = self.work / SETTINGS
        if path.exists():
            found = json.loads(path.read_bytes())
            if found != wanted:
                different = ", ".join(key for key in {**wanted, **found} if found.get(key) != wanted.get(key))
                raise InputError(
                    f"{self.out_dir}: was made with other {different}: choose another folder, or remove it"
                )
        elif self.out_dir.exists() and any(self.out_dir.glob("part_*")):
            raise InputError(f"{self.out_dir}: holds parts of other work: choose another folder")
        else:
            atomic.write_json(path, wanted)

    def executor(self, stage: str, steps: Sequence[Any], tasks: int, after: Any = None) -> Any:
        """Return datatrove's executor of one stage, which skips tasks that are done."""
        logs = str(self.work / stage)
        if self.slurm is None:
            workers = max(1, min(self.workers, tasks))
            return _Local(list(steps), tasks=tasks, workers=workers, logging_dir=logs, depends=after)
        bin_dir = Path(sys.executable).parent
        return SlurmPipelineExecutor(
            list(steps),
            tasks=tasks,
            time=self.slurm.time,
            partition=self.slurm.partition,
            mem_per_cpu_gb=self.slurm.memory_gb,
            job_name=f"{self.name}_{stage}",
            qos="",
            workers=self.workers,
            env_command=f'export PATH="{bin_dir}:$PATH"',
            logging_dir=logs,
            depends=after,
            job_id_retriever=partial(record_job, self.out_dir / WORK / JOBS),
        )


class _Local(LocalPipelineExecutor):
    """datatrove's local executor, whose log goes to files only, and whose processes end with this one."""

    def run(self) -> Any:
        interrupts.keep_blocked(resource_tracker.ensure_running)
        with interrupts.unfinished(get_temp_dir()):  # of this process and those that it starts
            return self._run()

    def _run(self) -> Any:
        register_after_fork(self, partial(_end_with, os.getpid()))  # its manager would wait for ever
        return super().run()

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> Any:
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                return super()._run_for_rank(rank, local_rank, node_rank)
        finally:
            logger.remove()


def _end_with(parent: int, _: _Local) -> None:
    """End this process once its parent has ended, however that one ends."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class SpacedWords(WordTokenizer):
    """A word splitter at spaces, after datatrove has removed punctuation; datatrove's own one needs spaCy."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        raise NotImplementedError

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        raise NotImplementedError


class RawDocuments(PipelineStep):
    """A datatrove reader of everything that `tokenize` reads. Part number `rank` is read by task `rank`."""

    type = "📖 - READER"
    name = "raw documents"

    def __init__(
        self,
        parts: Sequence[Sequence[Source]],
        read: ReadOptions,
        tolerance: Tolerance,
        notes_dir: Path | None = None,
    ) -> None:
        """Set up the step; records that do not become documents are noted in `notes_dir`, if it is given."""
        super().__init__()
        self.parts, self.read, self.tolerance, self.notes_dir = parts, read, tolerance, notes_dir

    def run(self, data: Any, rank: int, world_size: int) -> Iterator[Any]:
        """Yield the documents of one part; `metadata` holds the raw file and the record."""
        with self._notes(rank) as notes:
            yield from self._documents(rank, notes)

    def _notes(self, rank: int) -> contextlib.AbstractContextManager[Any]:
        if self.notes_dir is None:
            return contextlib.nullcontext(io.BytesIO())
        self.notes_dir.mkdir(parents=True, exist_ok=True)
        return atomic.atomic_file(self.notes_dir / f"{rank:05d}.skipped")

    def _documents(self, rank: int, notes: Any) -> Iterator[Any]:
        log, parent, records = RejectLog(self.tolerance, unit="part", listed_in=REMOVED), os.getppid(), 0

        def note(source: Source, record: int, reason: str, detail: str) -> None:
            notes.write(_line({"file": source.name, "record": record, "reason": reason, "detail": detail}))

        def reject(source: Source, *bad: Any) -> None:
            log.add(source.name, source.path, *bad)
            note(source, *bad)

        raw: list[dict[str, Any]] = []
        cleanings = Cleanings()
        for source in self.parts[rank]:
            reader = Reader(source.path, source.format, self.read, partial(reject, source))
            for batch in reader.batches():
                if os.getppid() != parent:
                    raise InputError("the program that started this task has ended")
                records += len(batch.texts)
                for number, text in zip(batch.numbers, batch.texts, strict=True):
                    if not text:
                        note(source, number, EMPTY, "the text has no character")
                        continue
                    self.stat_update("documents")
                    yield Document(text=text, id=f"{rank}/{number}", metadata={"file": source.name, "record": number})
            _refuse_changed(source, reader)
            origins = cleanings.origins_of(source.path, reader.sha256, reader.unpacked_sha256)
            behind = [each.model_dump() for each in origins]
            raw.append({"name": source.name, "sha256": reader.sha256, "origins": behind})
        log.check(records + log.total)
        if self.notes_dir is not None:
            atomic.write_json(self.notes_dir / f"{rank:05d}.raw", raw)


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

    def __init__(self, out_dir: Path, notes_dir: Path, note: Callable[[Any], dict[str, Any] | None]) -> None:
        """Set up the step; `note` returns data to keep of each document, saved as JSON lines in `notes_dir`."""
        super().__init__()
        self.out_dir, self.notes_dir, self.note = out_dir, notes_dir, note

    def run(self, data: Any, rank: int, world_size: int) -> None:
        kept: Counter[str] = Counter()
        path = self.out_dir / part_name(rank)
        self.notes_dir.mkdir(parents=True, exist_ok=True)
        with (
            atomic.atomic_file(self.notes_dir / f"{rank:05d}.kept") as notes,
            atomic.atomic_file(path) as file,
            zstandard.ZstdCompressor(level=_LEVEL).stream_writer(file, closefd=False) as out,
        ):
            for document in data:
                where = {"file": document.metadata["file"], "record": document.metadata["record"]}
                out.write(_line({"text": document.text, **where}))
                found = self.note(document)
                if found is not None:
                    notes.write(_line({**where, **found}))
                kept[where["file"]] += 1
        written = {"name": path.name, "sha256": file_sha256(path), "bytes": path.stat().st_size, "kept": kept}
        if not kept:
            path.unlink()
        atomic.write_json(self.notes_dir / f"{rank:05d}.part", written)


class RemovalLog:
    """A log of the documents removed from a part; datatrove's filters use it as their exclusion writer."""

    def __init__(self, notes_dir: Path, note: Callable[[Any], dict[str, Any]]) -> None:
        self.notes_dir, self.note = notes_dir, note
        self._file: Any = None

    def __enter__(self) -> "RemovalLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, document: Any, rank: int = 0, **_: Any) -> None:
        if self._file is None:
            self.notes_dir.mkdir(parents=True, exist_ok=True)
            self._file = open(self.notes_dir / f"{rank:05d}.removed", "wb")  # noqa: SIM115
        where = {"file": document.metadata["file"], "record": document.metadata["record"]}
        self._file.write(_line({**where, **self.note(document)}))


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def read_notes(folder: Path, suffix: str) -> Iterator[dict[str, Any]]:
    """Yield the notes of all parts in order."""
    for path in sorted(folder.glob(f"*.{suffix}")):
        with open(path, "rb") as file:
            yield from map(json.loads, file)


def finish(out_dir: Path, notes_dir: Path, done: Path, removed: Iterator[Sequence[Any]]) -> None:
    """List the removed documents, then the records that were skipped; leave the counts in `done`."""
    skipped = (
        (note["file"], note["record"], note["reason"], "", note["detail"]) for note in read_notes(notes_dir, "skipped")
    )
    with atomic.atomic_file(out_dir / REMOVED) as file:
        text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
        table = csv.writer(text, delimiter="\t", lineterminator="\n")
        table.writerow(COLUMNS)
        counts = {kind: _write_rows(table, rows) for kind, rows in (("removed", removed), ("skipped", skipped))}
        text.detach()
    parts = [_described(path) for path in sorted(notes_dir.glob("*.part"))]
    if len(parts) < len([*notes_dir.glob("*.skipped")]):
        raise InputError(f"{out_dir}: an older version began this. Remove the folder, and run the command again")
    CleaningManifest(parts=[part for part in parts if part.documents]).write(out_dir)
    atomic.write_json(done, {"kept": sum(part.documents for part in parts), **counts})


def _described(notes: Path) -> Part:
    """Return a part's entry in the manifest: its raw files are those that gave it documents."""
    written, read = json.loads(notes.read_bytes()), json.loads(notes.with_suffix(".raw").read_bytes())
    files = [
        (RawFile(name=raw["name"], sha256=raw["sha256"]), [RawFile(**each) for each in raw["origins"]])
        for raw in read
        if raw["name"] in written["kept"]
    ]
    kept = sum(written["kept"].values())
    return part_of(written["name"], written["sha256"], written["bytes"], kept, files)


def _write_rows(table: Any, rows: Iterator[Sequence[Any]]) -> int:
    count = 0
    for row in rows:
        table.writerow(row)
        count += 1
    return count


def require_datatrove() -> None:
    """Refuse to start without datatrove; keep its log off the terminal."""
    if PipelineStep is object:
        raise InputError("datatrove is not installed. Install it with: pip install 'megatron-blackmamba[dedup]'")
    logger.remove()
