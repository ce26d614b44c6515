"""Token shards on disk: Megatron's `.bin` and `.idx`, plus a manifest that records the origin of every token.

`.bin` has the token ids of all documents, back to back. `.idx` has 34 bytes of header, then the int32 length and the
int64 byte offset of every sequence. The int64 number of the first sequence of every document follows, and at the end
the number of sequences. Here every document is one sequence, as in Megatron's own preprocessing.
"""

import base64
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.document_sample import DocumentSample, Sampled

FORMAT_VERSION = 1
MANIFEST_SUFFIX = ".manifest.json"
SUFFIXES = (MANIFEST_SUFFIX, ".bin", ".idx")
LONGEST_DOCUMENT = (1 << 31) - 1
"""Most tokens of a document: lengths are int32 in an index."""

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPE_OF_CODE = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_CODE_OF_DTYPE = {name: code for code, name in _DTYPE_OF_CODE.items()}


class ShardError(ValueError):
    """A shard that is missing, damaged, or not what its manifest says."""


class UnreadableShardError(ShardError):
    """An I/O error while a shard was read."""

    worth_another_try = True  # a network disk may recover


class RawFile(BaseModel):
    """A raw file that a cleaning read, or the decompressed content of a compressed one."""

    model_config = ConfigDict(extra="forbid")

    name: str
    sha256: str


class SourceFile(BaseModel):
    """One raw file that went into a shard, and how many of its records did."""

    model_config = ConfigDict(extra="forbid")

    name: str
    sha256: str
    bytes: int
    modified_ns: int = Field(
        default=0, description="time stamp of the file when it was read; spares a re-read, no more"
    )
    records: int = Field(description="documents taken and rejected together")
    documents: int
    origins: list[RawFile] = Field(
        default_factory=list,
        description="raw files behind a cleaned part, or what a compressed file holds",
    )
    side: str | None = Field(
        default=None,
        description="of a split by hash: a bit for each record that was not rejected, set for those in this shard",
    )

    @property
    def all_raw(self) -> list["RawFile | SourceFile"]:
        """Return this file, if it gave documents, and the raw files behind it."""
        return [self, *self.origins] if self.documents else []

    @cached_property
    def mask(self) -> np.ndarray | None:
        """Return for each record that was not rejected whether it is in the shard; None means that all are."""
        if self.side is None:
            return None
        count, _, packed = self.side.partition(":")
        bits = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint8)
        return np.unpackbits(bits, count=int(count)).astype(bool)


class Reject(BaseModel):
    """One record that was skipped because the caller allowed it."""

    model_config = ConfigDict(extra="forbid")

    source: str
    record: int = Field(description="line or row, counted from 1")
    reason: str


class ShardManifest(BaseModel):
    """The manifest of a shard: enough to verify its files and to rebuild them."""

    model_config = ConfigDict(extra="forbid")

    format_version: int = FORMAT_VERSION
    documents: int
    tokens: int = Field(description="token ids in the .bin, one EOD per document included")
    dtype: Literal["uint16", "int32", "uint8", "int8", "int16", "int64"]
    bin_sha256: str
    idx_sha256: str
    eod_id: int
    tokenizer: str = Field(description="file name or Hugging Face name")
    tokenizer_sha256: str
    vocab_size: int
    sources: list[SourceFile]
    rejected: dict[str, int] = Field(default_factory=dict, description="how many records were skipped, by reason")
    rejects: list[Reject] = Field(default_factory=list, description="the first of them, one by one")
    not_taken: int = Field(default=0, description="files in the input folders that were not taken for any shard")
    not_taken_files: list[str] = Field(default_factory=list, description="the first of them")
    text_bytes: int = Field(default=0, description="UTF-8 bytes of the documents")
    rechecked: int = Field(
        default=0, description="documents encoded a second time by the reference tokenizer: all equal"
    )
    shard: int = Field(default=1, description="number of this shard in its folder, from 1")
    shards: int = Field(default=0, description="shards in its folder once all are made; 0 where that is not known")
    shuffled: bool = False
    seed: int = 0
    sample: DocumentSample | None = Field(
        default=None, description="hashes of some documents, to find them in other shards; older manifests have none"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="settings that decide the content")
    versions: dict[str, str] = Field(default_factory=dict)

    @property
    def bin_bytes(self) -> int:
        return self.tokens * np.dtype(self.dtype).itemsize

    @property
    def sampled(self) -> Sampled | None:
        """Return the sample of documents; None if the version that wrote the manifest has none or another kind."""
        return self.sample.decode() if self.sample else None

    def raw_record(self, number: int) -> tuple[str, int | None]:
        """Return the raw file and the record of document `number` in the order in which the shard was read.

        The record is None where the manifest does not list all rejects of the file by its name.
        """
        for source in self.sources:
            if number < source.documents:
                break
            number -= source.documents
        else:
            raise IndexError(f"{number} documents beyond the last one")
        if sum(self.rejected.values()) > len(self.rejects) or self._shares_name(source):
            return source.name, None
        if source.mask is not None:
            number = int(np.flatnonzero(source.mask)[number])
        record = number + 1
        for skipped in sorted(reject.record for reject in self.rejects if reject.source == source.name):
            if skipped > record:
                break
            record += 1
        return source.name, record

    def _shares_name(self, source: SourceFile) -> bool:
        """Return whether rejects of this name may be of another source, as in older shards from several URLs."""
        return (
            any(reject.source == source.name for reject in self.rejects)
            and sum(other.name == source.name for other in self.sources) > 1
        )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "ShardManifest":
        path = Path(path)
        try:
            content = path.read_bytes()
            _refuse_other_version(path, content)
            return cls.model_validate_json(content)
        except FileNotFoundError:
            raise ShardError(f"{path}: no such manifest. {no_manifest_advice(path)}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise ShardError(f"{path}: not a shard manifest: {where}: {first['msg']}") from None

    def write(self, path: str | os.PathLike[str]) -> None:
        atomic.write_text(path, self.model_dump_json(indent=2) + "\n")


def missing_parts(manifests: Iterable[ShardManifest]) -> tuple[list[int], int]:
    """Return the shard numbers that a folder lacks, and how many it should have; older manifests do not know."""
    manifests = list(manifests)
    expected = max((manifest.shards for manifest in manifests), default=0)
    return sorted(set(range(1, expected + 1)) - {manifest.shard for manifest in manifests}), expected


def shard_names(numbers: Sequence[int], most: int = 5) -> str:
    return ", ".join(f"shard_{number:05d}" for number in numbers[:most]) + (", ..." if len(numbers) > most else "")


def _refuse_other_version(path: Path, content: bytes) -> None:
    """Refuse a newer format version before looking for unknown keys."""
    try:
        version = json.loads(content).get("format_version", FORMAT_VERSION)
    except (ValueError, AttributeError, RecursionError):
        return
    if version != FORMAT_VERSION:
        raise ShardError(
            f"{path}: manifest format {version}, this version reads {FORMAT_VERSION}: "
            "tokenize again, or use the version of blackmamba that wrote it"
        )


@dataclass(frozen=True)
class Idx:
    """An index, read whole. Sequence i is `sequence_lengths[i]` tokens from byte `pointers[i]` of the .bin;
    document d is the sequences `document_indices[d]` up to `document_indices[d + 1]`."""

    dtype: np.dtype
    sequence_lengths: np.ndarray
    pointers: np.ndarray
    document_indices: np.ndarray

    @property
    def documents(self) -> int:
        return len(self.document_indices) - 1

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the .bin must have."""
        if not len(self.sequence_lengths):
            return 0
        return int(self.pointers[-1]) // self.dtype.itemsize + int(self.sequence_lengths[-1])


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest dtype that Megatron uses for a vocabulary of this size."""
    return np.dtype("uint16" if vocab_size < 65500 else "int32")


def idx_bytes(sequences: int, documents: int) -> int:
    """Return the size of an .idx file."""
    return _HEADER.size + sequences * (4 + 8) + (documents + 1) * 8


def read_idx(path: str | os.PathLike[str]) -> Idx:
    """Read an .idx file, after checking that its header and its size agree."""
    with _open_idx(Path(path)) as file:
        dtype, sequences, documents = _read_idx_head(file)
        wanted = ((np.int32, sequences), (np.int64, sequences), (np.int64, documents + 1))
        return Idx(dtype, *(_read_array(file, np.dtype(each), length) for each, length in wanted))


def _open_idx(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise ShardError(f"{path}: no such index") from None


def _read_idx_head(file: BinaryIO) -> tuple[np.dtype, int, int]:
    """Return the type of the tokens, and how many sequences and documents there are."""
    header, size = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise ShardError(f"{file.name}: not a Megatron index (it must begin with {_MAGIC!r})")
    _, version, code, sequences, document_entries = _HEADER.unpack(header)
    if version != 1 or code not in _DTYPE_OF_CODE:
        raise ShardError(
            f"{file.name}: index version {version}, type code {code}: only version 1, codes 1 to 8 are known"
        )
    expected = idx_bytes(sequences, document_entries - 1)
    if document_entries < 1 or size not in (expected, expected + sequences):  # + sequences: one mode byte each
        raise ShardError(
            f"{file.name}: {size} bytes, but its header announces {sequences} sequences and {document_entries - 1} "
            f"documents, which take {expected}: the file is damaged or incomplete"
        )
    return np.dtype(_DTYPE_OF_CODE[code]), sequences, document_entries - 1


def _read_array(file: BinaryIO, dtype: np.dtype, length: int) -> np.ndarray:
    array = np.empty(length, dtype)
    if length and file.readinto(array.view(np.uint8).data) < array.nbytes:  # type: ignore[attr-defined]
        raise ShardError(f"{file.name}: was truncated while it was read. Restore it, or tokenize again")
    return array


def write_idx(file: BinaryIO, dtype: np.dtype, document_lengths: np.ndarray) -> str:
    """Write the index of documents of one sequence each, lying back to back in the .bin; return its sha256."""
    lengths = np.ascontiguousarray(document_lengths, dtype=np.int32)
    if len(lengths) and int(np.min(lengths)) < 1:
        raise ValueError("an index cannot contain an empty document")
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    pointers = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(lengths) else ends
    digest = hashlib.sha256()
    header = _HEADER.pack(_MAGIC, 1, _CODE_OF_DTYPE[dtype.name], len(lengths), len(lengths) + 1)
    for part in (header, lengths.data, pointers.data, np.arange(len(lengths) + 1, dtype=np.int64).data):
        file.write(part)
        digest.update(part)
    return digest.hexdigest()


def check_idx(idx: Idx, *, bin_bytes: int, name: str = "index") -> None:
    """Raise ShardError unless the sequences cover the .bin exactly and the documents cover the sequences."""
    lengths, pointers, indices = idx.sequence_lengths, idx.pointers, idx.document_indices
    if len(lengths) and int(lengths.min()) < 1:
        raise ShardError(f"{name}: sequence {int(np.argmin(lengths))} has length {int(lengths.min())}")
    ends = np.cumsum(lengths, dtype=np.int64) * idx.dtype.itemsize
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(lengths)]
    wrong = np.flatnonzero(pointers != starts)
    if len(wrong):
        at = int(wrong[0])
        raise ShardError(
            f"{name}: sequence {at} begins at byte {pointers[at]}, the lengths before it end at {starts[at]}"
        )
    covered = int(ends[-1]) if len(ends) else 0
    if covered != bin_bytes:
        raise ShardError(f"{name}: describes {covered} bytes of tokens, the .bin has {bin_bytes}")
    if indices[0] != 0 or indices[-1] != len(lengths) or (len(indices) > 1 and int(np.diff(indices).min()) < 0):
        raise ShardError(f"{name}: its documents do not cover its {len(lengths)} sequences in order")


def shard_prefix(path: str | os.PathLike[str]) -> Path:
    """Return the prefix, such as `pile/shard_00001`, of any of its files."""
    path = Path(path)
    for suffix in SUFFIXES:
        if path.name.endswith(suffix) and path.name != suffix:
            return path.with_name(path.name[: -len(suffix)])
    return path


def beside(prefix: Path, suffix: str) -> Path:
    """Return prefix + suffix; unlike `with_suffix`, it keeps dots in the name."""
    return Path(f"{prefix}{suffix}")  # . and / have no name to append to


@dataclass(frozen=True)
class Shard:
    """One shard on disk. Opening reads the manifest and the head of the index."""

    prefix: Path
    manifest: ShardManifest

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Shard":
        """Open by prefix or by any of the three files; .bin and .idx must be there with the size they should have."""
        prefix = shard_prefix(path)
        shard = cls(prefix, ShardManifest.read(beside(prefix, MANIFEST_SUFFIX)))
        size = shard.manifest.bin_bytes
        if not shard.bin_path.exists():
            raise ShardError(f"{shard.bin_path}: missing, though {shard.manifest_path.name} describes it")
        if shard.bin_path.stat().st_size != size:
            raise ShardError(
                f"{shard.bin_path}: {shard.bin_path.stat().st_size} bytes, its manifest says {size}: "
                "the file was truncated or replaced; `blackmamba data tokenize` makes it again"
            )
        with _open_idx(shard.idx_path) as file:
            _, _, documents = _read_idx_head(file)
        if documents != shard.manifest.documents:
            raise ShardError(
                f"{shard.idx_path}: {documents} documents, its manifest says {shard.manifest.documents}: "
                "the files do not belong together"
            )
        return shard

    @property
    def bin_path(self) -> Path:
        return beside(self.prefix, ".bin")

    @property
    def idx_path(self) -> Path:
        return beside(self.prefix, ".idx")

    @property
    def manifest_path(self) -> Path:
        return beside(self.prefix, MANIFEST_SUFFIX)

    @cached_property
    def idx(self) -> Idx:
        return read_idx(self.idx_path)

    @cached_property
    def token_ids(self) -> "TokenFile":
        """Return all token ids; slices are read from disk."""
        return TokenFile(self)

    def document(self, number: int) -> np.ndarray:
        """Return the token ids of one document, including its EOD."""
        start, length = self.span(number)
        return self.token_ids[start : start + length]

    def span(self, number: int) -> tuple[int, int]:
        """Return the first token of a document, and how many it has."""
        first, last = self.idx.document_indices[number : number + 2]
        start = int(self.idx.pointers[first]) // self.idx.dtype.itemsize
        return start, int(self.idx.sequence_lengths[first:last].sum())

    def document_at(self, token: int) -> int:
        """Return the number of the document that a token belongs to."""
        sequence = int(np.searchsorted(self.idx.pointers, token * self.idx.dtype.itemsize, side="right")) - 1
        return int(np.searchsorted(self.idx.document_indices, sequence, side="right")) - 1


class TokenFile:
    """The token ids of a shard on disk; a slice of it is read into a new array.

    Files are not memory-mapped: if one is cut meanwhile, or its disk fails, a mapping kills the process with SIGBUS.
    Threads and forked processes may share it.
    """

    def __init__(self, shard: Shard) -> None:
        self.path = shard.bin_path
        self._dtype, self._length = np.dtype(shard.manifest.dtype), shard.manifest.tokens
        self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        if hasattr(os, "posix_fadvise"):  # else the kernel reads ahead megabytes for every window
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, step = part.indices(self._length)
        if step != 1:
            raise ValueError(f"a slice of tokens has step 1, not {step}")
        ids = np.empty(max(0, stop - start), self._dtype)
        if self._read(ids, start * self._dtype.itemsize) < ids.nbytes:
            self._read_in_parts(ids.view(np.uint8), start * self._dtype.itemsize)
        return ids

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "_file"):
            close(self._file)  # at exit, `os` may be gone

    def _read(self, target: np.ndarray, offset: int) -> int:
        try:
            return os.preadv(self._file, [target.data], offset)
        except OSError as error:
            raise UnreadableShardError(
                f"{self.path}: cannot be read at token {offset // self._dtype.itemsize}: {error.strerror}. "
                "Check the disk or its network, and start again"
            ) from None

    def _read_in_parts(self, target: np.ndarray, offset: int) -> None:
        """Read bytes from `offset` on, as many as `target` has; systems limit what one call may read."""
        done = 0
        while done < len(target):
            count = self._read(target[done:], offset + done)
            if not count:
                raise ShardError(
                    f"{self.path}: ends after {os.fstat(self._file).st_size} bytes, its manifest says "
                    f"{self._length * self._dtype.itemsize}: the file was truncated while in use. Restore it; "
                    f"`blackmamba data verify {shard_prefix(self.path)}` checks it"
                )
            done += count


def no_manifest_advice(manifest_path: Path) -> str:
    if any(manifest_path.parent.glob("*.bin")):
        return (
            "A .bin without its manifest is unfinished, or was made by another tool: "
            "finish it with `blackmamba data tokenize`, or describe it with `blackmamba data adopt`"
        )
    return "Make shards with `blackmamba data tokenize INPUT... OUT_DIR --tokenizer FILE`"
