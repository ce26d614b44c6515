"""One shard from its raw files: read, encode, check, shuffle, write; it appears whole, or not at all."""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_blackmamba.console import interrupts
from megatron_blackmamba.data_tools.batches import Batch, ReadOptions, Rejecter
from megatron_blackmamba.data_tools.hold_out import HoldOut, packed
from megatron_blackmamba.data_tools.options import TokenizeOptions
from megatron_blackmamba.data_tools.origins import Cleanings
from megatron_blackmamba.data_tools.progress import listed
from megatron_blackmamba.data_tools.readers import Reader, out_of_memory
from megatron_blackmamba.data_tools.rejects import EMPTY, InputError, RejectLog, Tolerance
from megatron_blackmamba.data_tools.shuffle import DocumentShuffler, order_keys
from megatron_blackmamba.data_tools.sources import NotTaken, Source
from megatron_blackmamba.data_tools.streams import STDIN
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.document_sample import DocumentSampler
from megatron_blackmamba.formats.shards import (
    LONGEST_DOCUMENT,
    MANIFEST_SUFFIX,
    ShardManifest,
    SourceFile,
    beside,
    token_dtype,
    write_idx,
)
from megatron_blackmamba.tokenizer import Tokenizer
from megatron_blackmamba.version import __version__

RECHECKED_ONE_IN = 1024
_RECHECKED_AT_FIRST_BYTES = 64 << 10
_RECHECKED_CHARACTERS = 1 << 20  # of one document: the reference takes 140 bytes of memory for each
_COUNTED_AT_ONCE = 128  # texts joined into one: it stays in the cache, and many are ASCII
_TOKEN_BYTES_PER_INPUT_BYTE = {False: 0.6, True: 2.5}  # of plain and of compressed text; only sizes the buckets

Report = Callable[[int, int, int], None]  # input bytes, tokens, documents: so far
Add = Callable[[np.ndarray, np.ndarray, np.ndarray], None]  # tokens, lengths and keys of adjacent documents


@dataclass(frozen=True)
class ShardJob:
    """One shard to write."""

    number: int
    of: int
    """Shards of the whole plan."""
    sources: tuple[Source, ...]
    out_dir: Path
    options: TokenizeOptions
    read: ReadOptions = field(default_factory=ReadOptions)
    tolerance: Tolerance = field(default_factory=Tolerance)
    not_taken: NotTaken = field(default_factory=NotTaken)
    hold_out: HoldOut | None = None

    @property
    def recorded_options(self) -> dict[str, Any]:
        """Return the options as recorded in the manifest, to detect whether the shard was made with them."""
        return {
            "formats": sorted({source.format for source in self.sources}),
            "fields": list(self.read.fields),
            "joiner": self.read.joiner,
            "marker": self.read.marker,
            "special_text": self.options.special_text,
            "encoding": self.read.encoding,
            "hold_out": self.hold_out.recorded if self.hold_out else None,
            "lengths": self.lengths,
        }

    @property
    def lengths(self) -> list[int | None] | None:
        """Return the least and the most tokens of a document, its EOD aside; None: documents of every length."""
        both = [self.options.min_tokens, self.options.max_tokens]
        return both if any(both) else None

    @property
    def chooses(self) -> bool:
        """Return whether the shard takes some of its documents only, and so perhaps none."""
        return bool(self.hold_out or self.lengths)

    @property
    def prefix(self) -> Path:
        return self.out_dir / f"shard_{self.number:05d}"

    @property
    def manifest_path(self) -> Path:
        return beside(self.prefix, MANIFEST_SUFFIX)

    @property
    def work_folder(self) -> Path:
        return self.out_dir / f".{self.prefix.name}.tmp"

    @property
    def input_bytes(self) -> int:
        return sum(source.bytes for source in self.sources)


def write_shard(job: ShardJob, tokenizer: Tokenizer, report: Report = lambda *_: None) -> ShardManifest:
    """Write the three files of a shard; its manifest comes last, so a shard without one is not finished."""
    try:
        with _work_folder(job) as folder:
            return _Writing(job, tokenizer, report, folder).run()
    except OSError as error:  # no space, no permission, a file that went away
        where = error.filename or job.prefix
        raise InputError(f"{where}: {error.strerror or error}; nothing of {job.prefix.name} was written") from error


class _Writing:
    def __init__(self, job: ShardJob, tokenizer: Tokenizer, report: Report, folder: Path) -> None:
        self.job, self.tokenizer, self.report, self.folder = job, tokenizer, report, folder
        self.options = job.options
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.rejects = RejectLog(job.tolerance)
        self.cleanings = Cleanings()
        self.digest = hashlib.sha256()
        self.sampler = DocumentSampler()
        self.lengths: list[np.ndarray] = []
        self.masks: list[np.ndarray] = []
        """Of the file that is read now: which of its documents are on this side of a split."""
        self.sources: list[SourceFile] = []
        self.documents = self.left_out = self.tokens = self.text_bytes = self.rechecked = self.first_bytes = 0
        self.finished_bytes = 0

    def run(self) -> ShardManifest:
        bin_path, idx_path = self.folder / "bin", self.folder / "idx"
        with open(bin_path, "wb") as file, self._shuffler() as shuffler:
            add = shuffler.add if shuffler else lambda tokens, lengths, _: self._write(file, tokens.data, lengths)
            for source in self.job.sources:
                self._read(source, add)
            for data, lengths in shuffler.drain(self.dtype.itemsize) if shuffler else ():
                self._write(file, data, lengths)
        self.rejects.check(self.documents + self.left_out + self.rejects.bad)
        if not self.documents and not self.job.chooses:
            paths = ["standard input" if source.path == STDIN else source.path for source in self.job.sources]
            raise InputError(f"{listed(paths)}: not one document in {self.job.prefix.name}: leave these files out")
        lengths = np.concatenate([np.empty(0, np.int32), *self.lengths])
        with open(idx_path, "wb") as file:
            idx_sha256 = write_idx(file, self.dtype, lengths)
        manifest = self._manifest(idx_sha256)
        self.job.manifest_path.unlink(missing_ok=True)
        atomic.publish(idx_path, beside(self.job.prefix, ".idx"))
        atomic.publish(bin_path, beside(self.job.prefix, ".bin"))
        manifest.write(self.job.manifest_path)
        return manifest

    def _read(self, source: Source, add: Add) -> None:
        documents, bad, self.masks = self.documents, self.rejects.total, []

        def reject(record: int, reason: str, detail: str) -> None:
            self.rejects.add(source.name, source.path, record, reason, detail)

        reader = Reader(source.path, source.format, self.job.read, reject)
        for batch in reader.batches():
            if batch.texts:
                try:
                    self._encode(batch, source, add, reject)
                except MemoryError:
                    raise InputError(out_of_memory(source.path, reader.bytes_read)) from None
            self.report(self.finished_bytes + reader.bytes_read, self.tokens, self.documents)
        if source.path != STDIN and reader.bytes_read != source.bytes:
            raise InputError(
                f"{source.path}: had {source.bytes} bytes when the work was planned, {reader.bytes_read} were read: "
                "another program is writing to it. Wait until it is complete"
            )
        self.finished_bytes += reader.bytes_read
        taken = self.documents - documents
        self.sources.append(
            SourceFile(
                name=source.name,
                sha256=reader.sha256,
                bytes=reader.bytes_read,
                modified_ns=source.modified_ns,
                records=taken + self.rejects.total - bad,
                documents=taken,
                origins=self.cleanings.origins_of(source.path, reader.sha256, reader.unpacked_sha256),
                side=packed(np.concatenate(self.masks)) if self.masks else None,
            )
        )

    def _encode(self, batch: Batch, source: Source, add: Add, reject: Rejecter) -> None:
        mask = self._on_this_side(batch, source)
        if mask is not None:
            self.left_out += int(np.sum(~mask))
            batch = batch.chosen(np.flatnonzero(mask))
            if not batch.texts:
                self.masks.append(mask)
                return
        ids, lengths = self.tokenizer.encode_batch(batch.texts, special_text=self.options.special_text)
        wanted = self._wanted(lengths)
        if mask is None and self.job.lengths:
            mask = np.ones(len(lengths), bool)
        if mask is not None:
            places = np.flatnonzero(mask)
            mask[places] = wanted
            self.masks.append(np.delete(mask, places[lengths == 0]))  # what is rejected now has no bit
        for i in np.flatnonzero(lengths == 0):
            reject(batch.numbers[i], EMPTY, "the text makes no token")
        kept = np.flatnonzero(wanted & (lengths > 0))
        self.left_out += int(np.sum(~wanted & (lengths > 0)))
        if len(kept) < len(lengths):
            ids = ids[np.repeat(wanted, lengths)]
            batch = batch.chosen(kept)
            lengths = lengths[kept]
            if not len(kept):
                return
        self._check_ids(ids, lengths, batch, source)
        keys = order_keys(self.options.seed, self.job.number, self.documents, len(lengths))
        self._recheck(ids, lengths, keys, batch, source)
        self.sampler.add(ids, lengths)
        tokens = with_eod(ids, lengths, self.tokenizer.eod_id, self.dtype)
        add(tokens, lengths + 1, keys)
        self.documents += len(lengths)
        self.tokens += len(tokens)
        self.text_bytes += utf8_bytes(batch.texts)

    def _wanted(self, lengths: np.ndarray) -> np.ndarray:
        """Return which documents have as many tokens as --min-tokens and --max-tokens ask for."""
        options = self.options
        return (lengths >= (options.min_tokens or 0)) & (lengths <= (options.max_tokens or LONGEST_DOCUMENT))

    def _on_this_side(self, batch: Batch, source: Source) -> np.ndarray | None:
        hold_out = self.job.hold_out
        return None if hold_out is None else hold_out.takes(source.name, batch.numbers, batch.texts)

    def _check_ids(self, ids: np.ndarray, lengths: np.ndarray, batch: Batch, source: Source) -> None:
        """Check the range of every token id and the length of every document."""
        if int(lengths.sum()) != len(ids) or int(ids.max()) >= self.tokenizer.vocab_size:
            raise RuntimeError(
                f"{source.path}: {self.tokenizer.batch_backend} returned ids that do not belong to its texts"
            )
        if int(lengths.max()) >= LONGEST_DOCUMENT:
            record = batch.numbers[int(np.argmax(lengths))]
            raise InputError(f"{source.path}, record {record}: {lengths.max()} tokens; an index holds at most 2^31 - 1")
        if not self.options.special_text:
            ends = np.flatnonzero(ids == self.tokenizer.eod_id)
            if len(ends):
                record = batch.numbers[int(np.searchsorted(np.cumsum(lengths), ends[0], side="right"))]
                raise InputError(
                    f"{source.path}, record {record}: its text becomes {self.tokenizer.eod_token}, the end of a "
                    "document: this tokenizer does not keep that token apart from text. Choose another with --eod"
                )

    def _recheck(self, ids: np.ndarray, lengths: np.ndarray, keys: np.ndarray, batch: Batch, source: Source) -> None:
        """Encode a sample once more with the reference: the first of a shard, then one in a thousand, chosen by key."""
        sample = set(np.flatnonzero(keys % np.uint64(RECHECKED_ONE_IN) == 0).tolist())
        for i, text in enumerate(batch.texts):
            if self.first_bytes >= _RECHECKED_AT_FIRST_BYTES:
                break
            sample.add(i)
            self.first_bytes += len(text)
        ends = np.cumsum(lengths)
        special_text = self.options.special_text
        chosen = sorted(sample)
        texts = [batch.texts[i][:_RECHECKED_CHARACTERS] for i in chosen]
        expected = self.tokenizer.encode_each(texts, special_text=special_text)
        for i, text, expected_ids in zip(chosen, texts, expected, strict=True):
            found = ids[ends[i] - lengths[i] : ends[i]]
            if len(text) < len(batch.texts[i]):  # both encode its beginning
                found, _ = self.tokenizer.encode_batch([text], special_text=special_text)
            if found.tolist() != expected_ids:
                raise RuntimeError(
                    f"{source.path}, record {batch.numbers[i]}: {self.tokenizer.batch_backend} and the reference "
                    "tokenizer disagree on it. Run again with --backend tokenizers, and please report this text"
                )
        self.rechecked += len(sample)

    def _shuffler(self) -> contextlib.AbstractContextManager[DocumentShuffler | None]:
        if not self.options.shuffle:
            return contextlib.nullcontext()
        expected = sum(
            source.bytes * _TOKEN_BYTES_PER_INPUT_BYTE[not source.path.endswith((".jsonl", ".txt"))]
            for source in self.job.sources
        )
        if self.job.sources[0].path == STDIN:
            expected = 1 << 33
        return DocumentShuffler(self.folder, int(expected) * self.dtype.itemsize // 2)

    def _write(self, file: BinaryIO, data: bytes | memoryview, lengths: np.ndarray) -> None:
        file.write(data)
        self.digest.update(data)
        self.lengths.append(lengths.astype(np.int32))

    def _manifest(self, idx_sha256: str) -> ShardManifest:
        tokenizer = self.tokenizer
        return ShardManifest(
            documents=self.documents,
            tokens=self.tokens,
            dtype=self.dtype.name,
            bin_sha256=self.digest.hexdigest(),
            idx_sha256=idx_sha256,
            eod_id=tokenizer.eod_id,
            tokenizer=tokenizer.short_name,
            tokenizer_sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            sources=self.sources,
            rejected=dict(sorted(self.rejects.counts.items())),
            rejects=self.rejects.first,
            not_taken=self.job.not_taken.count,
            not_taken_files=list(self.job.not_taken.first),
            text_bytes=self.text_bytes,
            rechecked=self.rechecked,
            shard=self.job.number,
            shards=self.job.of,
            shuffled=self.options.shuffle,
            seed=self.options.seed if self.options.shuffle else 0,
            sample=self.sampler.sample(),
            options=self.job.recorded_options,
            versions={"blackmamba": __version__, **tokenizer.versions},
        )


def utf8_bytes(texts: Sequence[str]) -> int:
    """Return the number of bytes of all texts in UTF-8."""
    total = 0
    for first in range(0, len(texts), _COUNTED_AT_ONCE):
        text = "".join(texts[first : first + _COUNTED_AT_ONCE])
        total += len(text) if text.isascii() else len(text.encode())
    return total


def with_eod(ids: np.ndarray, lengths: np.ndarray, eod_id: int, dtype: np.dtype) -> np.ndarray:
    """Return the ids of adjacent documents, with EOD after each document."""
    tokens = np.empty(len(ids) + len(lengths), dtype)
    ends = np.cumsum(lengths + 1) - 1
    is_text = np.ones(len(tokens), bool)
    is_text[ends] = False
    tokens[is_text] = ids
    tokens[ends] = eod_id
    return tokens


@contextlib.contextmanager
def _work_folder(job: ShardJob) -> Iterator[Path]:
    """Yield a locked folder for temporary files of this shard, and remove it with any files of a killed process."""
    folder, locked = job.work_folder, False
    with interrupts.undoing(lambda: _discard(job) if locked else None):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            _lock(descriptor, folder, job)
            locked = True
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def discard_unfinished(jobs: Iterable[ShardJob]) -> None:
    """Remove what killed processes left of shards, unless another process writes the shard now."""
    for job in jobs:
        with contextlib.suppress(OSError, InputError):
            descriptor = os.open(job.work_folder, os.O_RDONLY)
            try:
                _lock(descriptor, job.work_folder, job)
                _discard(job)
            finally:
                os.close(descriptor)


def _discard(job: ShardJob) -> None:
    interrupts.remove(job.work_folder)
    for draft in job.out_dir.glob(f".{job.manifest_path.name}.*.tmp"):
        draft.unlink(missing_ok=True)
    if not job.manifest_path.exists():
        for suffix in (".bin", ".idx"):
            beside(job.prefix, suffix).unlink(missing_ok=True)


def _lock(descriptor: int, folder: Path, job: ShardJob) -> None:
    busy = InputError(f"{job.prefix}: another process is writing this shard now; let it finish")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise busy from None
    except OSError:
        return  # a file system without locks
    if not folder.exists() or folder.stat().st_ino != os.fstat(descriptor).st_ino:  # its last owner just removed it
        raise busy
