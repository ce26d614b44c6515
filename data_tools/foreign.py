"""Token files of datatrove (`.ds`) and of dolma and OLMo (`.npy`) as `.bin` and `.idx`, without copying the tokens."""

import csv
import gzip
import os
import shutil
import zlib
from pathlib import Path

import numpy as np

from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.formats.atomic import atomic_file
from megatron_blackmamba.formats.remote import file_sha256
from megatron_blackmamba.formats.shards import LONGEST_DOCUMENT, beside, token_dtype, write_idx
from megatron_blackmamba.tokenizer import Tokenizer

SUFFIXES = (".ds", ".npy")
_NUMPY_MAGIC = b"\x93NUMPY"
_PIECE = 8 << 20
_STORED: dict[int, np.dtype] = {2: np.dtype("uint16"), 4: np.dtype("int32")}
"""By bytes of a token. Ids are far below 2^31: uint32 reads the same as int32, which Megatron's index knows."""


def expose(path: Path, tokenizer: Tokenizer, dtype: str | None = None) -> tuple[Path, list[int]]:
    """Give a token file a `.bin`, a link if possible, and an `.idx`.

    Returns their prefix, and the documents without a token, which an index cannot hold, counted from 1.

    dtype: uint16 or uint32, for a file that does not tell its type, nor a file beside it.
    """
    prefix = path.with_name(path.name.removesuffix(path.suffix))
    header, stored = _header(path)
    size = path.stat().st_size - header
    if dtype not in (None, "uint16", "uint32"):
        raise InputError(f"--dtype {dtype}: choose uint16 or uint32")
    item = stored or (2 if dtype == "uint16" else 4 if dtype else 0)
    ends = _listed_ends(path)
    if ends is not None and ends[-1:].any() and not item:
        item = size // int(ends[-1])
    item = item or _guessed_item(path, tokenizer)
    if item not in _STORED or size % item or (ends is not None and (ends[-1:] != size // item).any()):
        listed = f", and its index ends at token {ends[-1]}" if ends is not None and len(ends) else ""
        raise InputError(
            f"{path}: {size} bytes are not a whole number of {item}-byte tokens{listed}. Name the type: --dtype uint32"
        )
    if ends is None:
        ends = _ends_by_eod(path, header, _STORED[item], tokenizer.eod_id)
    lengths = np.diff(ends, prepend=0)
    if lengths.size and int(lengths.min()) < 0:
        raise InputError(f"{path}: the documents of its index overlap")
    if lengths.size and int(lengths.max()) > LONGEST_DOCUMENT:
        raise InputError(
            f"{path}: document {1 + int(lengths.argmax())} has {lengths.max():,} tokens, and an index holds 2^31 - 1."
            " If it is many documents, name the token that ends them: --eod"
        )
    _link(path, beside(prefix, ".bin"), header)
    with atomic_file(beside(prefix, ".idx")) as file:
        write_idx(file, _STORED[item], lengths[lengths > 0])
    return prefix, (1 + np.flatnonzero(lengths == 0)).tolist()


def _guessed_item(path: Path, tokenizer: Tokenizer) -> int:
    """Return the smallest type that holds the vocabulary, unless the tokens are visibly wider."""
    item = token_dtype(tokenizer.vocab_size).itemsize
    if item == 2 and path.stat().st_size % 4 == 0:
        halves = np.fromfile(path, "<u2", count=1 << 20)
        if len(halves) >= 16 and halves.any() and not halves[1::2].any():
            raise InputError(f"{path}: every second 2-byte token is 0, as in 4-byte tokens. Name the type: --dtype")
    return item


def _header(path: Path) -> tuple[int, int]:
    """Return the bytes before the tokens, and the bytes of a token; 0 where the file does not say.

    OLMo's `.npy` files are bare tokens; numpy's own begin with a header.
    """
    with open(path, "rb") as file:
        if file.read(len(_NUMPY_MAGIC)) != _NUMPY_MAGIC:
            return 0, 0
        file.seek(0)
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, found = read(file)
        except ValueError as error:
            raise InputError(f"{path}: its numpy header cannot be read: {error}") from None
        if len(shape) != 1 or found.name not in ("uint16", "uint32", "int32") or found.newbyteorder("<") != found:
            raise InputError(
                f"{path}: holds {found} of shape {shape}, not a row of little-endian uint16 or uint32 token ids"
            )
        return file.tell(), found.itemsize


def _listed_ends(path: Path) -> np.ndarray | None:
    """Return where documents end, in tokens: from datatrove's `.index` or dolma's `.csv.gz`, if it lies beside."""
    index, table = beside(path, ".index"), path.with_suffix(".csv.gz")
    if path.suffix == ".ds":
        if not index.exists():
            raise InputError(f"{index}: missing. datatrove writes it with save_index=True")
        if index.stat().st_size % 8:
            raise InputError(f"{index}: {index.stat().st_size} bytes are not a whole number of 8-byte ends: it was cut")
        return np.fromfile(index, "<u8").astype(np.int64)
    if not table.exists():
        return None
    try:
        with gzip.open(table, "rt", newline="") as file:
            ends = [int(row[1]) for row in csv.reader(file) if row and row[1].isdecimal()]
    except (EOFError, IndexError, ValueError, csv.Error, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{table}: not a table with the end of each document in its second column: {error}") from None
    return np.array(ends, np.int64)


def _ends_by_eod(path: Path, header: int, dtype: np.dtype, eod_id: int) -> np.ndarray:
    """Return where documents end by their EOD; tokens after the last one are a document too."""
    tokens = np.memmap(path, dtype, mode="r", offset=header)
    starts = range(0, len(tokens), _PIECE)
    found = [start + 1 + np.flatnonzero(tokens[start : start + _PIECE] == eod_id) for start in starts]
    ends = np.concatenate(found) if found else np.empty(0, np.int64)
    return ends if len(ends) and ends[-1] == len(tokens) else np.append(ends, len(tokens))


def _link(path: Path, bin_path: Path, header: int) -> None:
    """Make the `.bin`: the same file under another name, or, behind a header, a copy."""
    if bin_path.exists():
        copied = header and file_sha256(bin_path) == file_sha256(path, header)
        if not copied and not bin_path.samefile(path):
            raise InputError(f"{bin_path}: is there, and is not {path.name}. Move one of them to another folder")
        return
    if header:
        with open(path, "rb") as source, atomic_file(bin_path) as file:
            source.seek(header)
            shutil.copyfileobj(source, file, _PIECE)
        return
    try:
        os.link(path, bin_path)
    except OSError:  # a file system without hard links
        bin_path.symlink_to(path.name)
