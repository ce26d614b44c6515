"""Tables whose text is stored as a dictionary: pieces of bounded size, as one string may stand in every row."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megatron_blackmamba.data_tools.batches import BATCH_BYTES, LONGEST_RECORD
from megatron_blackmamba.data_tools.rejects import InputError

MOST_BYTES = 8 * BATCH_BYTES
"""A table with at most so much text stays whole."""


def unfolded(table: pa.RecordBatch, place: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows in pieces of about BATCH_BYTES, without dictionaries. Refuse a row beyond LONGEST_RECORD."""
    sizes = sum((text_bytes(column) for column in table.columns), np.zeros(table.num_rows, np.int64))
    if sizes.max(initial=0) > LONGEST_RECORD:
        raise InputError(
            f"{place}: a row holds {sizes.max():,} bytes of text, and at most {LONGEST_RECORD:,} are read. Leave it out"
        )
    ends, start = sizes.cumsum(), 0
    whole = not len(ends) or ends[-1] <= MOST_BYTES
    while start < table.num_rows or (whole and not start):
        before = ends[start - 1] if start else 0
        end = table.num_rows if whole else int(np.searchsorted(ends, before + BATCH_BYTES, side="right"))
        end = max(end, start + 1)
        yield _decoded(table.slice(start, end - start))
        start = end


def text_bytes(array: pa.Array) -> np.ndarray:
    """Return the bytes of text in each row, each occurrence of a string counted."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        sizes = np.append(text_bytes(array.dictionary), 0)  # the last one for null
        return sizes[array.indices.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)]
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        return pc.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        sums = np.concatenate([[0], text_bytes(array.flatten()).cumsum()])
        ends = lengths.cumsum()
        return sums[ends] - sums[ends - lengths]
    if pa.types.is_struct(kind):
        return sum(map(text_bytes, array.flatten()), _nothing(array))
    return _nothing(array)


def is_folded(array: pa.Array) -> bool:
    """Return whether an array is a dictionary and places in it."""
    return pa.types.is_dictionary(array.type)


def _nothing(array: pa.Array) -> np.ndarray:
    return np.zeros(len(array), np.int64)


def _decoded(table: pa.RecordBatch) -> pa.RecordBatch:
    for place, field in enumerate(table.schema):
        if (plain := _plain(field.type)) != field.type:
            table = table.set_column(place, field.name, table.column(place).cast(plain))
    return table


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return a type without dictionaries."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in map(kind.field, range(kind.num_fields))])
    return kind
