"""Raw bytes of an input, decompressed and hashed block by block; a cut or damaged file never passes for a whole one."""

import hashlib
import sys
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

from data_tools.rejects import DAMAGED_FILE, TRUNCATED_FILE

STDIN = "-"
_READ_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class Damage(Exception):
    """A compressed input that ends too early or does not decompress."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class InputStream(AbstractContextManager["InputStream"]):
    """One input file, or standard input for `-`. Compression is told by the first bytes, not by the name."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.bytes_read = 0
        self._digest = hashlib.sha256()
        self._file: BinaryIO = sys.stdin.buffer if str(path) == STDIN else open(path, "rb")  # noqa: SIM115

    def __exit__(self, *_: object) -> None:
        if str(self.path) != STDIN:
            self._file.close()

    def blocks(self) -> Iterator[bytes]:
        """Decompressed bytes; raises Damage after the last good ones where the file is cut or damaged."""
        first = self._read()
        if first.startswith(_GZIP_MAGIC):
            yield from self._members(first, _gzip_decompressor, "gzip member")
        elif first.startswith(_ZSTD_MAGIC) or _is_zstd_skippable(first):
            yield from self._members(first, _zstd_decompressor, "zstd frame")
        elif str(self.path).endswith((".gz", ".zst", ".zstd")) and first:
            raise Damage(DAMAGED_FILE, f"begins with {first[:16]!r}, which is neither gzip nor zstd")
        elif str(self.path).endswith((".gz", ".zst", ".zstd")):
            raise Damage(TRUNCATED_FILE, "the file has no bytes at all")
        else:
            block = first
            while block:
                yield block
                block = self._read()

    def sha256(self) -> str:
        """Fingerprint of the file as stored, whatever part of it was asked for."""
        while self._read():
            pass
        return self._digest.hexdigest()

    def _read(self) -> bytes:
        block = self._file.read(_READ_BYTES)
        self._digest.update(block)
        self.bytes_read += len(block)
        return block

    def _members(self, block: bytes, make_decompressor: Any, what: str) -> Iterator[bytes]:
        """Both formats may hold several compressed pieces in a row; the file is whole only if the last one is."""
        decompressor, inside = make_decompressor(), False
        while block:
            try:
                output = decompressor.decompress(block)
            except Exception as error:  # zlib.error, isal's own and ZstdError share no ancestor
                raise Damage(DAMAGED_FILE, f"near byte {self.bytes_read}: {error}") from None
            inside = True
            if output:
                yield output
            block = b""
            if decompressor.eof:
                block, inside = decompressor.unused_data, False
                decompressor = make_decompressor()
                if not block.strip(b"\0"):  # some writers pad with zeros
                    block = b""
            block = block or self._read()
        if inside:
            raise Damage(TRUNCATED_FILE, f"the file ends inside a {what}, after {self.bytes_read} bytes")


def _gzip_decompressor() -> Any:
    try:
        from isal import isal_zlib  # 2.5 times as fast

        return isal_zlib.decompressobj(wbits=31)
    except ImportError:
        return zlib.decompressobj(wbits=31)


def _zstd_decompressor() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()  # the Pile needs long windows


def _is_zstd_skippable(head: bytes) -> bool:
    return len(head) >= 4 and 0x50 <= head[0] <= 0x5F and head[1:4] == b"\x2a\x4d\x18"


def file_sha256(path: str | Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(8 << 20):
            digest.update(block)
    return digest.hexdigest()
