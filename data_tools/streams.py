"""Raw bytes of an input, decompressed and hashed block by block; a cut or damaged file never passes for a whole one."""

import codecs
import difflib
import encodings.aliases
import hashlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from megatron_blackmamba.data_tools.compression import KINDS, Compression
from megatron_blackmamba.data_tools.rejects import DAMAGED_FILE, TRUNCATED_FILE, InputError
from megatron_blackmamba.formats.remote import open_any

STDIN = "-"
_READ_BYTES = 1 << 20


class Damage(Exception):
    """A compressed input that ends too early or does not decompress."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def known_encoding(name: str | None) -> str | None:
    """Return the name of a character encoding as Python has it, None for UTF-8; refuse one that is unknown."""
    if name is None:
        return None
    try:
        codec = codecs.lookup(name)
        "a".encode(codec.name)
    except (LookupError, UnicodeError):
        near = difflib.get_close_matches(name.lower().replace("-", "_"), encodings.aliases.aliases.values(), n=1)
        raise InputError(
            f"--encoding {name}: no such character encoding" + (f"; did you mean {near[0]}?" if near else "")
        ) from None
    return None if codec.name == "utf-8" else codec.name


def in_utf8(blocks: Iterator[bytes], encoding: str, path: str | Path) -> Iterator[bytes]:
    """Yield text of another encoding as UTF-8; refuse bytes that are none in it."""
    decoder, before = codecs.getincrementaldecoder(encoding)(), 0
    for block in chain(blocks, (b"",)):
        try:
            yield decoder.decode(block, final=not block).encode()
        except UnicodeError as bad:
            place = before + getattr(bad, "start", 0)
            raise InputError(f"{path}: near byte {place}: not {encoding}. Choose another --encoding") from None
        before += len(block)


class InputStream(AbstractContextManager["InputStream"]):
    """One input file, or standard input for `-`. Compression is detected from the first bytes, not the name."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.bytes_read = 0
        self.unpacked_sha256 = ""
        """Of the decompressed bytes of a compressed file, once all of them have been read."""
        self._digest = hashlib.sha256()
        self._file: BinaryIO = sys.stdin.buffer if str(path) == STDIN else open_any(path)

    def __exit__(self, *_: object) -> None:
        if str(self.path) != STDIN:
            self._file.close()

    def blocks(self) -> Iterator[bytes]:
        """Yield decompressed bytes; raise Damage after the last good ones where the file is cut or damaged."""
        first = self._read()
        kind = next((kind for kind in KINDS if kind.matches(first)), None)
        expected = next((kind.name for kind in KINDS if str(self.path).endswith(kind.suffixes)), None)
        if kind:
            digest = hashlib.sha256()
            for piece in filter(None, self._members(first, kind)):
                digest.update(piece)
                yield piece
            self.unpacked_sha256 = digest.hexdigest()
        elif expected and first:
            raise Damage(DAMAGED_FILE, f"begins with {first[:16]!r}, which is not {expected}")
        elif expected:
            raise Damage(TRUNCATED_FILE, "the file has no bytes at all")
        else:
            block = first
            while block:
                yield block
                block = self._read()

    def sha256(self) -> str:
        """Return the SHA-256 of the whole stored file, even if only a part was read."""
        while self._read():
            pass
        return self._digest.hexdigest()

    def _read(self) -> bytes:
        block = self._file.read(_READ_BYTES)
        self._digest.update(block)
        self.bytes_read += len(block)
        return block

    def _members(self, block: bytes, kind: Compression) -> Iterator[bytes]:
        """Yield the content of all compressed members in a row; the file is complete only if the last member is."""
        decompressor, inside = kind.decompressor(), False
        while block:
            try:
                rest = yield from kind.pieces(decompressor, block)
            except (MemoryError, InputError):
                raise
            except Exception as error:  # zlib.error, isal's own, LZMAError and ZstdError share no ancestor
                if "memory" in str(error).lower():
                    raise MemoryError(str(error)) from None
                raise Damage(DAMAGED_FILE, f"near byte {self.bytes_read}: {error}") from None
            inside = not decompressor.eof
            if inside:
                block = self._read()
            else:
                decompressor = kind.decompressor()
                block = rest if rest.strip(b"\0") else self._read()  # some writers pad with zeros
        if inside:
            raise Damage(TRUNCATED_FILE, f"the file ends inside a {kind.member}, after {self.bytes_read} bytes")
