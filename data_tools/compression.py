"""Compressed formats, with output piece by piece: a small file may hold gigabytes.

The `pieces` of a format yield at most PIECE_BYTES at a time, and return the input behind the end of a member.
"""

import re
import zlib
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from megatron_blackmamba.data_tools.rejects import InputError

PIECE_BYTES = 4 << 20
"""Most bytes of one piece."""
_ZSTD_SLICE_BYTES = 4 << 10  # zstd has no limit on its output: this much input makes at most 131 MB

Pieces = Generator[bytes, None, bytes]


def _gzip() -> Any:
    try:
        from isal import isal_zlib  # 2.5 times as fast
    except ImportError:
        return zlib.decompressobj(wbits=31)
    return isal_zlib.decompressobj(wbits=31)


def _pieces_of_gzip(inner: Any, block: bytes) -> Pieces:
    while not inner.eof:  # zlib keeps its unconsumed_tail after the end of a member
        output = inner.decompress(block, PIECE_BYTES)
        block = inner.unconsumed_tail
        yield output
        if not block and len(output) < PIECE_BYTES:
            break
    return inner.unused_data


def _zstd() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()  # the Pile needs long windows


def _pieces_of_zstd(inner: Any, block: bytes) -> Pieces:
    for start in range(0, len(block), _ZSTD_SLICE_BYTES):
        output = inner.decompress(block[start : start + _ZSTD_SLICE_BYTES])
        yield from (output[at : at + PIECE_BYTES] for at in range(0, len(output), PIECE_BYTES))
        if inner.eof:
            return inner.unused_data + block[start + _ZSTD_SLICE_BYTES :]
    return b""


def _lz4() -> Any:
    try:
        from lz4.frame import LZ4FrameDecompressor
    except ImportError:
        raise _unread("lz4", "the Python package lz4: `pip install lz4`") from None
    return LZ4FrameDecompressor()


def _bzip2() -> Any:
    try:
        from bz2 import BZ2Decompressor
    except ImportError:
        raise _unread("bzip2", "a Python that was built with it") from None
    return BZ2Decompressor()


def _xz() -> Any:
    try:
        from lzma import FORMAT_XZ, LZMADecompressor
    except ImportError:
        raise _unread("xz", "a Python that was built with it") from None
    return LZMADecompressor(FORMAT_XZ)


def _unread(tool: str, needs: str) -> InputError:
    pipe = f"`{tool} -dc FILE | blackmamba data tokenize - OUT_DIR ...`"
    return InputError(f"reading {tool} files needs {needs}, or pipe: {pipe}")


def _pieces_within_limit(inner: Any, block: bytes) -> Pieces:
    """For bz2, xz and lz4: their decompressors keep what exceeds the limit and say whether they need input."""
    yield inner.decompress(block, PIECE_BYTES)
    while not (inner.eof or inner.needs_input):
        yield inner.decompress(b"", PIECE_BYTES)
    return inner.unused_data or b""


class Compression(NamedTuple):
    name: str
    member: str
    suffixes: tuple[str, ...]
    magic: bytes
    """Regular expression of the first bytes of a file."""
    decompressor: Callable[[], Any]
    """Starts on a member; a file may have several in a row."""
    pieces: Callable[[Any, bytes], Pieces] = _pieces_within_limit

    def matches(self, head: bytes) -> bool:
        return re.match(self.magic, head, re.DOTALL) is not None


KINDS = (
    Compression("gzip", "gzip member", (".gz",), rb"\x1f\x8b", _gzip, _pieces_of_gzip),
    Compression(  # a file may begin with a frame to skip
        "zstd", "zstd frame", (".zst", ".zstd"), rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", _zstd, _pieces_of_zstd
    ),
    Compression("bzip2", "bzip2 stream", (".bz2",), rb"BZh.(1AY&|\x17\x72\x45\x38)", _bzip2),
    Compression("xz", "xz stream", (".xz",), rb"\xfd7zXZ\x00", _xz),
    Compression("lz4", "lz4 frame", (".lz4",), rb"\x04\x22\x4d\x18", _lz4),
)
SUFFIXES = tuple(suffix for kind in KINDS for suffix in kind.suffixes)
