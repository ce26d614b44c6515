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
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
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
    from datatrove.utils.word_tokenizers import WordTokenizer, load_word_tokenizer
    from loguru import logger
    from multiprocess import resource_tracker
    from multiprocess.util import get_temp_dir, register_after_fork
except ImportError:  # said by `require_datatrove`
    Document = Any
    LocalPipelineExecutor = SlurmPipelineExecutor = PipelineExecutor = PipelineStep = WordTokenizer = object

from megatron_blackmamba import interrupts
from megatron_blackmamba.data_tools.batches import ReadOptions
from megatron_blackmamba.data_tools.options import CleaningOptions
from megatron_blackmamba.data_tools.origins import DONE, SETTINGS, WORK, CleaningManifest, Cleanings, Part, part_of
from megatron_blackmamba.data_tools.readers import Reader
from megatron_blackmamba.data_tools.rejects import EMPTY, InputError, RejectLog, Tolerance
from megatron_blackmamba.data_tools.sources import Source
from megatron_blackmamba.data_tools.words import SplitWords, split_words
from megatron_blackmamba.data_tools.workers import usable_cores
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.remote import file_sha256, is_remote
from megatron_blackmamba.formats.shards import RawFile

Note = Callable[[Any], dict[str, Any] | None]
"""Returns what to note of a document."""
Row = tuple[str, int, str, str, str]
REMOVED = "removed.tsv"
ADDED = "added"
"""The metadata of a document that are further fields of its record in the part."""
COLUMNS = ("file", "record", "reason", "resembles", "detail")
_LEVEL = 3
JOBS = "slurm_jobs"
"""The file with the ids of the Slurm jobs that work in an output folder."""
_NEVER = "DependencyNeverSatisfied"
"""The reason of a pending job whose predecessor failed."""


def part_name(rank: int) -> str:
    """Return the name of the part that a task writes."""
    return f"part_{rank + 1:05d}.jsonl.zst"


@dataclass(frozen=True)
class Cleaning:
    """One deduplication or decontamination: the parts, the output folder, and how the tasks run."""

    name: str
    parts: Sequence[Sequence[Source]]
    out_dir: Path
    read: ReadOptions
    tolerance: Tolerance
    options: CleaningOptions
    settings: dict[str, Any]
    """What the result depends on, apart from the inputs."""

    @property
    def work(self) -> Path:
        """Return the folder for intermediate files, logs and markers."""
        return self.out_dir / WORK / self.name

    @property
    def done(self) -> Path:
        return self.work / DONE

    @property
    def notes(self) -> Path:
        """Return the folder for what the tasks note of documents and parts."""
        return self.work / "notes"

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
        if self.options.slurm is None:
            workers = min(self.options.workers or usable_cores(), tasks)
            return _Local(list(steps), tasks=tasks, workers=workers, logging_dir=logs, depends=after)
        bin_dir = Path(sys.executable).parent
        return SlurmPipelineExecutor(
            list(steps),
            tasks=tasks,
            time=self.options.time,
            partition=self.options.slurm,
            mem_per_cpu_gb=self.options.memory,
            job_name=f"{self.name}_{stage}",
            qos="",
            workers=self.options.workers or -1,
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


class RawDocuments(PipelineStep):
    """A datatrove reader of everything that `tokenize` reads. Part number `rank` is read by task `rank`."""

    type = "📖 - READER"
    name = "raw documents"

    def __init__(self, cleaning: Cleaning, *, noted: bool = True) -> None:
        """Set up the step; with `noted`, records that do not become documents are noted, and the files read."""
        super().__init__()
        self.cleaning, self.noted = cleaning, noted

    def run(self, data: Any, rank: int, world_size: int) -> Iterator[Any]:
        """Yield the documents of one part; `metadata` holds the raw file and the record."""
        if not self.noted:
            yield from self._documents(rank, io.BytesIO())
            return
        with atomic.atomic_file(self.cleaning.notes / f"{rank:05d}.skipped") as notes:
            raw = yield from self._documents(rank, notes)
        atomic.write_json(self.cleaning.notes / f"{rank:05d}.raw", raw)

    def _documents(self, rank: int, notes: Any) -> Generator[Any, None, list[dict[str, Any]]]:
        log = RejectLog(self.cleaning.tolerance, unit="part", listed_in=REMOVED)
        parent, records = os.getppid(), 0

        def note(source: Source, record: int, reason: str, detail: str) -> None:
            notes.write(note_line({"file": source.name, "record": record, "reason": reason, "detail": detail}))

        def reject(source: Source, *bad: Any) -> None:
            log.add(source.name, source.path, *bad)
            note(source, *bad)

        raw: list[dict[str, Any]] = []
        cleanings = Cleanings()
        for source in self.cleaning.parts[rank]:
            reader = Reader(source.path, source.format, self.cleaning.read, partial(reject, source))
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
        return raw


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

    def __init__(self, cleaning: Cleaning, note: Note = lambda _: None) -> None:
        """Set up the step; `note` returns data to note of each document."""
        super().__init__()
        self.out_dir, self.notes, self.note = cleaning.out_dir, cleaning.notes, note

    def run(self, data: Any, rank: int, world_size: int) -> None:
        kept: Counter[str] = Counter()
        cut = 0
        path = self.out_dir / part_name(rank)
        with (
            atomic.atomic_file(self.notes / f"{rank:05d}.kept") as notes,
            atomic.atomic_file(path) as file,
            zstandard.ZstdCompressor(level=_LEVEL).stream_writer(file, closefd=False) as out,
        ):
            for document in data:
                where = _where(document)
                added = document.metadata.get(ADDED, {})
                cut += "cut" in added
                out.write(note_line({"text": document.text, **where, **added}))
                found = self.note(document)
                if found is not None:
                    notes.write(note_line({**where, **found}))
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
        self._file.write(note_line({**_where(document), **(self.note(document) or {})}))


def _where(document: Any) -> dict[str, Any]:
    return {key: document.metadata[key] for key in ("file", "record")}


def note_line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


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


def require_datatrove() -> None:
    """Refuse to start without datatrove; keep its log off the terminal."""
    if PipelineStep is object:
        raise InputError("datatrove is not installed. Install it with: pip install 'megatron-blackmamba[dedup]'")
    logger.remove()


def record_job(path: Path, output: str) -> str:
    """Return the job id that sbatch printed, after adding it to the file at `path`."""
    job = output.split()[-1]
    with open(path, "a") as file:
        file.write(f"{job}\n")
        file.flush()
        os.fsync(file.fileno())
    return job


def refuse_unfinished_jobs(work: Path) -> None:
    """Refuse a folder in which Slurm jobs run or wait; forget those that have ended, however they did."""
    path = work / JOBS
    jobs = path.read_text().split() if path.exists() else []
    if not jobs:
        return
    queued = _queued(path, jobs)
    waiting = [job for job in dict.fromkeys(jobs) if job in queued]
    if waiting:
        raise InputError(
            f"{work.parent}: Slurm jobs {', '.join(waiting)} work in this folder. Let them finish, or end them with: "
            f"scancel {' '.join(waiting)}"
        )
    path.unlink()


def _queued(path: Path, jobs: list[str]) -> set[str]:
    """Return the ids of all jobs that run or can still start; the tasks of an array have one id."""
    command = ["squeue", "--noheader", "--all", "--format=%F %r"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or error
        raise InputError(
            f"{path}: lists Slurm jobs {', '.join(jobs)}, and squeue cannot tell whether they have ended "
            f"({str(detail).strip()}). Run this where squeue works, or remove the file once they have"
        ) from None
    rows = (line.split(maxsplit=1) for line in listed.splitlines() if line.strip())
    return {job for job, *reason in rows if _NEVER not in reason}
