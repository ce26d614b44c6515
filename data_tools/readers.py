"""Read documents from raw files in batches of about a megabyte: JSON Lines and plain text; tables are in tables.py."""

import json
import re
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import orjson

from megatron_blackmamba.data_tools import rejects
from megatron_blackmamba.data_tools.batches import BATCH_BYTES, LONGEST_RECORD, Batch, ReadOptions, Rejecter
from megatron_blackmamba.data_tools.fields import FieldError, TakeText, text_of
from megatron_blackmamba.data_tools.other_fields import MOST_DEPTH, too_deep, without_text
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.streams import STDIN, Damage, InputStream, in_utf8
from megatron_blackmamba.formats.remote import file_sha256, size_of, version_of

Format = Literal["jsonl", "parquet", "arrow", "text"]
TABLES = ("parquet", "arrow")
_BOM = b"\xef\xbb\xbf"
_LONG_NUMBER = re.compile(rb"\d{19}")
"""Digits of an integer that orjson would round."""


class Reader:
    """A reader of one file from beginning to end; afterwards it knows the file's fingerprint."""

    def __init__(self, path: str | Path, format: Format, options: ReadOptions, reject: Rejecter) -> None:
        self.path, self.format, self.options, self.reject = path, format, options, reject
        self.bytes_read = 0
        self.sha256 = ""
        self.unpacked_sha256 = ""
        """Of the decompressed bytes of a compressed file."""

    def batches(self) -> Iterator[Batch]:
        """Yield the documents of the file; name the file where memory does not suffice, and where it changes."""
        version = version_of(self.path) if str(self.path) != STDIN else None
        try:
            yield from self._table_batches() if self.format in TABLES else self._stream_batches()
        except MemoryError:
            raise InputError(out_of_memory(self.path, self.bytes_read)) from None
        except InputError:
            self._refuse_changed(version)  # which explains a bad record or damaged compression
            raise
        self._refuse_changed(version)

    def _refuse_changed(self, version: str | None) -> None:
        if version is not None and version_of(self.path) != version:
            raise InputError(
                f"{self.path}: changed while it was read: another program is writing to it, or replaced it. "
                "Wait until it is complete"
            )

    def _stream_batches(self) -> Iterator[Batch]:
        with InputStream(self.path) as stream:
            parser: Parser = (
                JsonLines(self.options, self.reject) if self.format == "jsonl" else Text(self.options, self.reject)
            )
            try:
                blocks = stream.blocks()
                for block in in_utf8(blocks, self.options.encoding, self.path) if self.options.encoding else blocks:
                    self.bytes_read = stream.bytes_read
                    yield from parser.feed(block)
                yield from parser.finish()
            except TooLong as error:
                raise InputError(f"{self.path}: {error}") from None
            except Damage as damage:
                yield from parser.finish(cut=True)
                self.reject(parser.number + 1, damage.reason, damage.detail)
            self.sha256, self.unpacked_sha256 = stream.sha256(), stream.unpacked_sha256
            self.bytes_read = stream.bytes_read

    def _table_batches(self) -> Iterator[Batch]:
        from megatron_blackmamba.data_tools.tables import read_arrow, read_parquet

        size = size_of(self.path)
        read = read_parquet if self.format == "parquet" else read_arrow
        for batch, fraction in read(self.path, self.options, self.reject):
            self.bytes_read = int(size * fraction)
            yield batch
        self.sha256 = file_sha256(self.path)
        self.bytes_read = size


class Parser:
    """A parser that turns bytes into batches of documents; `number` is that of the last record."""

    def __init__(self, options: ReadOptions, reject: Rejecter) -> None:
        self.options, self.reject = options, reject
        self.number = 0

    def feed(self, block: bytes) -> Iterator[Batch]:
        raise NotImplementedError

    def finish(self, cut: bool = False) -> Iterator[Batch]:
        """Handle the end of the input; the last record of a cut one is incomplete, and not returned."""
        raise NotImplementedError


class JsonLines(Parser):
    def __init__(self, options: ReadOptions, reject: Rejecter) -> None:
        super().__init__(options, reject)
        self.take: TakeText = text_of(options.fields, options.joiner)
        simple = len(options.fields) == 1 and options.fields[0].isidentifier() and not options.keep
        self.field = options.fields[0] if simple else None
        """The field, if it is the only one wanted, and at the top of the record."""
        self.rest = without_text(options.fields) if options.keep else None
        self.pending: list[bytes] = []
        self.pending_bytes = 0
        self.seen_any = False

    def feed(self, block: bytes) -> Iterator[Batch]:
        if not self.seen_any:
            block = block.removeprefix(_BOM)
            self.seen_any = True
        self.pending.append(block)
        self.pending_bytes += len(block)
        if self.pending_bytes >= BATCH_BYTES and b"\n" in block:
            yield self._parse(self._take_complete_lines().split(b"\n"))
        refuse_longer(self.pending_bytes, self.number + 1)

    def finish(self, cut: bool = False) -> Iterator[Batch]:
        *lines, unterminated = b"".join(self.pending).split(b"\n")
        self.pending = []
        yield self._parse(lines)
        if unterminated and not cut:
            yield self._parse([unterminated], terminated=False)

    def _take_complete_lines(self) -> bytes:
        block = b"".join(self.pending)
        end = block.rfind(b"\n")
        self.pending = [block[end + 1 :]]
        self.pending_bytes = len(self.pending[0])
        return block[:end]

    def _parse(self, lines: list[bytes], terminated: bool = True) -> Batch:
        texts = self._at_once(lines)
        if texts is not None:
            first, self.number = self.number + 1, self.number + len(lines)
            return Batch(texts, list(range(first, self.number + 1)))
        batch = Batch()
        loads, take, add, rest = orjson.loads, self.take, batch.add, self.rest
        for line in lines:
            self.number += 1
            try:
                record = loads(line)
                text = take(record)
            except orjson.JSONDecodeError as error:
                second = self._second_look(line, error, terminated)
                if second is None:
                    continue
                text, record = second
            except FieldError as error:
                self.reject(self.number, error.reason, error.detail)
                continue
            if rest is not None and too_deep(line, record):
                self.reject(
                    self.number, rejects.TOO_DEEP, f"more than {MOST_DEPTH} objects and lists inside each other"
                )
                continue
            add(self.number, text)
            if rest is not None:
                batch.rests.append(rest(json.loads(line) if _LONG_NUMBER.search(line) else record))
        return batch

    def _at_once(self, lines: list[bytes]) -> list[str] | None:
        """Return the texts of records that are all as they should be; None if they need a closer look.

        A record costs two calls here, which counts where records are short.
        """
        if self.field is None:
            return None
        try:
            texts = list(map(itemgetter(self.field), map(orjson.loads, lines)))
        except (ValueError, LookupError, TypeError):
            return None
        return texts if set(map(type, texts)) <= {str} else None

    def _second_look(self, line: bytes, error: orjson.JSONDecodeError, terminated: bool) -> tuple[str, Any] | None:
        """Find out why orjson rejects a line. Return its text and the record if that is valid, as with NaN or a BOM."""
        line = line.removeprefix(_BOM)  # of a second file that was appended to the first
        if not line or line.isspace():
            self.reject(self.number, rejects.BLANK, "")
            return None
        try:
            record = json.loads(line.decode())
            text = self.take(record)
            text.encode()
            return text, record
        except UnicodeDecodeError as bad:
            broken_end = not terminated and bad.end == len(line)
            reason = rejects.TRUNCATED_LINE if broken_end else rejects.INVALID_UTF8
            detail = f"byte {bad.start} of the line is 0x{line[bad.start]:02x}" + _utf16(self.number, line)
            self.reject(self.number, reason, detail)
        except UnicodeEncodeError as bad:
            self.reject(
                self.number, rejects.LONE_SURROGATE, f"\\u{ord(bad.object[bad.start]):04x} without its other half"
            )
        except FieldError as bad:
            self.reject(self.number, bad.reason, bad.detail)
        except RecursionError:
            self.reject(self.number, rejects.INVALID_JSON, rejects.TOO_DEEP)
        except ValueError:
            reason = rejects.INVALID_JSON if terminated else rejects.TRUNCATED_LINE
            self.reject(
                self.number, reason, f"{error.msg} at character {error.pos}: {_excerpt(line)}" + self._hint(line)
            )
        return None

    def _hint(self, line: bytes) -> str:
        if self.number == 1 and line.strip() in (b"[", b"{"):
            program = "." if line.strip() == b"{" else "'.[]'"
            return f"; this looks like JSON over several lines: `jq -c {program}` makes JSON lines of it"
        if self.number == 1 and line.count(b"\r") > 1:
            return "; its lines end with carriage returns alone: `tr '\\r' '\\n'` makes JSON lines of it"
        if self.number == 1 and line.startswith(b"WARC/"):
            return "; WARC files hold web pages, not text: extract it first, for example with datatrove's WarcReader"
        if self.number == 1 and line.lstrip()[:1] not in (b"{", b"["):
            return "; if this is plain text, add --format text"
        return ""


class Text(Parser):
    """One document a file, or the pieces between markers."""

    def __init__(self, options: ReadOptions, reject: Rejecter) -> None:
        super().__init__(options, reject)
        self.marker = options.marker.encode() if options.marker else None
        self.pending = bytearray()
        self.searched = 0

    def feed(self, block: bytes) -> Iterator[Batch]:
        self.pending += block
        refuse_longer(len(self.pending), self.number + 1)
        if self.marker is None or len(self.pending) < BATCH_BYTES:
            return
        # A marker may lie across two blocks: look again at its length before the end.
        if self.pending.find(self.marker, max(0, self.searched - len(self.marker))) < 0:
            self.searched = len(self.pending)
            return
        *pieces, rest = bytes(self.pending).split(self.marker)
        self.pending, self.searched = bytearray(rest), 0
        yield self._documents(pieces)

    def finish(self, cut: bool = False) -> Iterator[Batch]:
        pieces = bytes(self.pending).split(self.marker) if self.marker else [bytes(self.pending)]
        self.pending = bytearray()
        if cut or (self.marker and not pieces[-1].strip()):
            pieces.pop()  # what follows the last marker is the end of the file, not a document
        yield self._documents(pieces)

    def _documents(self, pieces: Iterable[bytes]) -> Batch:
        batch = Batch()
        for piece in pieces:
            self.number += 1
            if self.number == 1:
                piece = piece.removeprefix(_BOM)
            if self.marker and not piece.strip():
                self.reject(self.number, rejects.BLANK, "")
                continue
            try:
                batch.add(self.number, piece.decode())
            except UnicodeDecodeError as bad:
                detail = f"byte {bad.start} is 0x{piece[bad.start]:02x}" + _utf16(self.number, piece)
                self.reject(self.number, rejects.INVALID_UTF8, detail)
        return batch


class TooLong(ValueError):
    """A record beyond LONGEST_RECORD."""


def refuse_longer(size: int, number: int) -> None:
    """Refuse a record that may never end."""
    if size > LONGEST_RECORD:
        raise TooLong(f"record {number} is longer than {LONGEST_RECORD:,} bytes. Leave it out, or split it")


def out_of_memory(path: str | Path, bytes_read: int) -> str:
    return (
        f"{path}: out of memory near byte {bytes_read} of the file: a document there, or what it decompresses to, is "
        "larger than the memory this process may use. Give it more, use fewer --workers, or leave the file out"
    )


def _utf16(number: int, first: bytes) -> str:
    if number == 1 and first.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "; the file is UTF-16: add --encoding utf-16"
    return ""


def _excerpt(line: bytes, most: int = 60) -> str:
    text = line[:most].decode(errors="replace")
    return repr(text) + ("..." if len(line) > most else "")
