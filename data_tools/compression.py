"""Decompressors with one interface and bounded output: a small file may hold gigabytes, which come piece by piece."""

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from megatron_blackmamba.data_tools.rejects import InputError

PIECE_BYTES = 4 << 20
"""Most bytes of one piece."""
_ZSTD_SLICE_BYTES = 4 << 10  # zstd has no limit on its output: this much input makes at most 131 MB
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class Decompressor(Protocol):
    """A decompressor for one member of a file; a file may have several members in a row."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def pieces(self, block: bytes) -> Iterator[bytes]: ...


class _Zlib:
    def __init__(self) -> None:
        try:
            from isal import isal_zlib  # 2.5 times as fast

            self._inner: Any = isal_zlib.decompressobj(wbits=31)
        except ImportError:
            self._inner = zlib.decompressobj(wbits=31)

    def pieces(self, block: bytes) -> Iterator[bytes]:
        while not self.eof:  # zlib keeps its unconsumed_tail after the end of a member
            output = self._inner.decompress(block, PIECE_BYTES)
            block = self._inner.unconsumed_tail
            if output:
                yield output
            if not block and len(output) < PIECE_BYTES:
                return

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data


class _Limited:
    """For bz2, xz and lz4: their decompressors keep what exceeds the limit and say whether they need input."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def pieces(self, block: bytes) -> Iterator[bytes]:
        yield self._inner.decompress(block, PIECE_BYTES)
        while not (self._inner.eof or self._inner.needs_input):
            yield self._inner.decompress(b"", PIECE_BYTES)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data or b""


class _Zstd:
    def __init__(self) -> None:
        import zstandard

        self._inner = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()  # the Pile needs long windows
        self._unused = b""

    def pieces(self, block: bytes) -> Iterator[bytes]:
        for start in range(0, len(block), _ZSTD_SLICE_BYTES):
            output = self._inner.decompress(block[start : start + _ZSTD_SLICE_BYTES])
            yield from (output[at : at + PIECE_BYTES] for at in range(0, len(output), PIECE_BYTES))
            if self.eof:
                self._unused = self._inner.unused_data + block[start + _ZSTD_SLICE_BYTES :]
                return

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._unused


def _lz4() -> Decompressor:
    try:
        from lz4.frame import LZ4FrameDecompressor
    except ImportError:
        raise InputError(
            "reading lz4 files needs the Python package lz4: `pip install lz4`, or pipe: "
            "`lz4 -dc FILE | blackmamba data tokenize - OUT_DIR ...`"
        ) from None
    return _Limited(LZ4FrameDecompressor())


class Compression(NamedTuple):
    name: str
    member: str
    suffixes: tuple[str, ...]
    matches: Callable[[bytes], bool]
    """Whether a file that begins with these bytes is of this kind."""
    decompressor: Callable[[], Decompressor]


KINDS = (
    Compression("gzip", "gzip member", (".gz",), lambda head: head.startswith(b"\x1f\x8b"), _Zlib),
    Compression(
        "zstd",
        "zstd frame",
        (".zst", ".zstd"),
        lambda head: head.startswith(_ZSTD_MAGIC) or _is_skippable_frame(head),
        _Zstd,
    ),
    Compression(
        "bzip2",
        "bzip2 stream",
        (".bz2",),
        lambda head: head.startswith(b"BZh") and head[4:8] in (b"1AY&", b"\x17\x72\x45\x38"),
        lambda: _Limited(bz2.BZ2Decompressor()),
    ),
    Compression(
        "xz",
        "xz stream",
        (".xz",),
        lambda head: head.startswith(b"\xfd7zXZ\x00"),
        lambda: _Limited(lzma.LZMADecompressor(lzma.FORMAT_XZ)),
    ),
    Compression("lz4", "lz4 frame", (".lz4",), lambda head: head.startswith(b"\x04\x22\x4d\x18"), _lz4),
)
SUFFIXES = tuple(suffix for kind in KINDS for suffix in kind.suffixes)


def _is_skippable_frame(head: bytes) -> bool:
    return len(head) >= 4 and 0x50 <= head[0] <= 0x5F and head[1:4] == b"\x2a\x4d\x18"
