"""Read documents from tables: parquet files, and the Arrow files of `datasets.Dataset.save_to_disk`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_blackmamba.data_tools import rejects
from megatron_blackmamba.data_tools.batches import BATCH_BYTES, Batch, ReadOptions, Rejecter
from megatron_blackmamba.data_tools.fields import FieldError, TakeText, root_columns, text_of
from megatron_blackmamba.data_tools.other_fields import without_text
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.unfolding import is_folded, text_bytes, unfolded
from megatron_blackmamba.formats.remote import is_remote, open_any, size_of

_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
"""The last bytes of a complete Arrow stream; pyarrow takes one that ends between two batches for complete."""
FOLDED_BYTES, FEWEST_ROWS = 256 << 20, 16
"""Most bytes of a batch whose text is stored as a dictionary, and the fewest rows of one where it is nested too."""
_UNREADABLE = (ValueError, OverflowError, LookupError)
"""Of a value that no object of Python holds: bytes that are no text, a date after the year 9999, a zone of nowhere."""


def read_parquet(path: str | Path, options: ReadOptions, reject: Rejecter) -> Iterator[tuple[Batch, float]]:
    """Yield batches of a parquet file, and the fraction of its rows read so far."""
    try:
        whole = open_any(path) if is_remote(path) else path
        file = pq.ParquetFile(whole, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a complete parquet file ({_first_line(error)}): download it again") from None
    with file:
        columns = _columns(path, options, file.schema_arrow.names)
        file = _unless_folded(file, whole, columns)
        tables = file.iter_batches(batch_size=_rows_per_batch(file, columns), columns=columns)
        yield from _documents(path, tables, file.metadata.num_rows, options, reject)


def _unless_folded(file: pq.ParquetFile, source: Any, columns: list[str]) -> pq.ParquetFile:
    """Return a file to read from: a few bytes of a dictionary may stand for gigabytes of text.

    Where a batch could be that large, columns are read as dictionaries, at half the speed.
    """
    chunks = [(group, chunk.path_in_schema) for group, chunk in _folded(file) if not _is_nested(chunk)]
    wanted = [(group, name) for group, name in chunks if name in columns]
    if not wanted:
        return file
    names, rows = sorted({name for _, name in wanted}), _rows_per_batch(file, columns)
    folded = pq.ParquetFile(source, page_checksum_verification=True, read_dictionary=names)
    longest = max(_longest_in_dictionary(folded, group, names) for group in dict(wanted))
    unused, used = (file, folded) if rows * longest > FOLDED_BYTES else (folded, file)
    unused.close()
    return used


def _longest_in_dictionary(file: pq.ParquetFile, group: int, names: list[str]) -> int:
    """Return the bytes of the longest string in the dictionaries of a row group; 0 if it cannot be read."""
    try:
        first = next(file.iter_batches(batch_size=1, row_groups=[group], columns=names), None)
    except (pa.ArrowException, OSError):  # which reading the rows will say
        return 0
    folded = [column for column in first.columns if is_folded(column)] if first is not None else []
    return max((int(text_bytes(column.dictionary).max(initial=0)) for column in folded), default=0)


def _folded(file: pq.ParquetFile) -> Iterator[tuple[int, pq.ColumnChunkMetaData]]:
    """Yield the chunks whose text is stored as a dictionary, at least at first, with the numbers of their groups."""
    for number, group in enumerate(map(file.metadata.row_group, range(file.metadata.num_row_groups))):
        for chunk in map(group.column, range(group.num_columns)):
            if chunk.physical_type == "BYTE_ARRAY" and any("DICTIONARY" in encoding for encoding in chunk.encodings):
                yield number, chunk


def _is_nested(chunk: pq.ColumnChunkMetaData) -> bool:
    """Return whether a chunk is inside another column; pyarrow reads no dictionaries there."""
    return "." in chunk.path_in_schema


def read_arrow(path: str | Path, options: ReadOptions, reject: Rejecter) -> Iterator[tuple[Batch, float]]:
    """Yield batches of an Arrow file or stream, and the fraction of its bytes read so far."""
    if not size_of(path):
        raise InputError(f"{path}: is empty. Download it again")
    with pa.PythonFile(open_any(path), "r") if is_remote(path) else pa.memory_map(str(path)) as file:
        reader = _arrow_reader(path, file)
        columns = _columns(path, options, reader.schema.names)
        wanted = [reader.schema.get_field_index(column) for column in columns]
        size = max(1, file.size())

        def tables() -> Iterator[pa.RecordBatch]:
            count = getattr(reader, "num_record_batches", None)
            whole = iter(reader) if count is None else map(reader.get_batch, range(count))
            for table in whole:
                table = pa.RecordBatch.from_arrays([table.column(i) for i in wanted], names=columns)
                rows = max(1, BATCH_BYTES * table.num_rows // max(1, table.nbytes))
                yield from (table.slice(start, rows) for start in range(0, table.num_rows, rows))

        for batch, _ in _documents(path, tables(), 1, options, reject):
            yield batch, min(1.0, file.tell() / size)


def _arrow_reader(path: str | Path, file: pa.NativeFile) -> Any:
    """Open an Arrow stream, as save_to_disk writes it, or an Arrow file."""
    file.seek(max(0, file.size() - len(_STREAM_END)))
    complete = file.read() == _STREAM_END
    file.seek(0)
    try:
        stream = pa.ipc.open_stream(file)
    except (pa.ArrowException, OSError):
        file.seek(0)
    else:
        if not complete:
            raise InputError(f"{path}: not a complete Arrow stream (it has no end): download it again")
        return stream
    try:
        return pa.ipc.open_file(file)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a complete Arrow file ({_first_line(error)}): download it again") from None


def _columns(path: str | Path, options: ReadOptions, names: Sequence[str]) -> list[str]:
    columns, absent = root_columns(options.fields, names)
    if absent:
        raise InputError(
            f"{path}: no column `{absent[0]}`; it has {', '.join(names)}. Name the one with the text: --field"
        )
    columns = list(dict.fromkeys(names)) if options.keep else columns
    twice = next((column for column in columns if list(names).count(column) > 1), None)
    if twice:
        raise InputError(f"{path}: has two columns `{twice}`: rename one of them")
    return columns


def _documents(
    path: str | Path, tables: Iterator[pa.RecordBatch], rows: int, options: ReadOptions, reject: Rejecter
) -> Iterator[tuple[Batch, float]]:
    take, number = text_of(options.fields, options.joiner), 0
    rest = without_text(options.fields) if options.keep else None
    try:
        for table in tables:
            texts = root_columns(options.fields, table.schema.names)[0]
            for piece in unfolded(table, f"{path}, after row {number}"):
                batch = Batch()
                for row in _rows(_without_nanoseconds(piece), texts):
                    number += 1
                    if _add(batch, number, row, take, reject) and rest is not None:
                        batch.rests.append(rest(row))
                yield batch, number / max(1, rows)
    except pa.ArrowMemoryError as error:  # an ArrowException too
        raise MemoryError(str(error)) from None
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}, after row {number}: {_first_line(error)}: download it again") from None


def _without_nanoseconds(table: pa.RecordBatch) -> pa.RecordBatch:
    """Return the table with times of nanoseconds as text: Python's objects hold microseconds."""
    for place, field in enumerate(table.schema):
        kind = _held(field.type)
        if kind != field.type:
            table = table.set_column(place, field.name, table.column(place).cast(kind))
    return table


def _held(kind: pa.DataType) -> pa.DataType:
    """Return a type with text instead of times of nanoseconds, also inside lists, structs and maps."""
    if (pa.types.is_timestamp(kind) or pa.types.is_time64(kind)) and kind.unit == "ns":
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_held(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_held(kind.key_type), _held(kind.item_type))
    for is_kind, made in ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list)):
        if is_kind(kind):
            return made(kind.value_field.with_type(_held(kind.value_type)))
    return kind


def _add(batch: Batch, number: int, row: Any, take: TakeText, reject: Rejecter) -> bool:
    """Add a row to the batch, or reject it; return whether it was added."""
    try:
        if isinstance(row, UnicodeDecodeError):
            raise FieldError(rejects.INVALID_UTF8, f"byte {row.start} is 0x{row.object[row.start]:02x}")
        if isinstance(row, Exception):
            raise FieldError(rejects.OUT_OF_RANGE, str(row))
        batch.add(number, take(row))
    except FieldError as error:
        reject(number, error.reason, error.detail)
        return False
    return True


def _rows(table: pa.RecordBatch, texts: Sequence[str]) -> Iterator[dict | Exception]:
    """Yield the rows; the columns with the text are decoded."""
    binary = [name for name in texts if _has_bytes(table.schema.field(name).type)]
    try:
        yield from [_decoded_in(row, binary) for row in table.to_pylist()]
    except _UNREADABLE:  # one bad value spoils the batch: go row by row
        for i in range(table.num_rows):
            try:
                yield _decoded_in(table.slice(i, 1).to_pylist()[0], binary)
            except _UNREADABLE as error:
                yield error


def _decoded_in(row: dict, names: Sequence[str]) -> dict:
    for name in names:
        row[name] = _decoded(row[name])
    return row


def _has_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return True
    return any(_has_bytes(kind.field(i).type) for i in range(kind.num_fields))


def _decoded(value: Any) -> Any:
    """Decode binary columns as UTF-8, since many tools store text in them."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {key: _decoded(item) for key, item in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def _rows_per_batch(file: pq.ParquetFile, columns: list[str]) -> int:
    """Return how many rows have about BATCH_BYTES of text: a row may be a tweet or a book."""
    metadata = file.metadata
    wanted = 0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for i in range(row_group.num_columns):
            column = row_group.column(i)
            if column.path_in_schema.split(".")[0] in columns:
                wanted += column.total_uncompressed_size
    nested = [chunk.total_uncompressed_size for _, chunk in _folded(file) if _is_nested(chunk)]
    most = max(FEWEST_ROWS, FOLDED_BYTES // max(nested)) if nested else 65536
    return max(1, min(65536, most, BATCH_BYTES * metadata.num_rows // max(1, wanted)))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
