"""Sorted runs: files of records in the order of a 64-bit key, of which a reader takes a range of keys.

Tasks write runs; later tasks read the same range of keys from all of them, one open file at a time, and sort it in
memory. So memory and open files are bounded by the size of a range, not by the number of documents or parts.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron_blackmamba.formats.atomic import atomic_file

KEYS = 1 << 64
"""The number of different keys."""
_SAMPLES = 4096
"""Keys of a run that are looked at to cut all runs into ranges."""


def write_records(path: Path, records: np.ndarray) -> None:
    """Write an array as a file of records, which appears when it is complete."""
    with atomic_file(path) as file:
        file.write(np.ascontiguousarray(records).view(np.uint8).data)


def read_records(path: Path, dtype: np.dtype) -> np.ndarray:
    """Return the records of a file; they are read when they are used."""
    count = path.stat().st_size // dtype.itemsize
    return np.memmap(path, dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype)


def files_of(folder: Path) -> list[Path]:
    """Return the files of a folder in order, without those that a killed process left unfinished."""
    return sorted(folder.glob("[0-9]*"))


def write_run(path: Path, records: np.ndarray) -> None:
    """Write records in the order of their `key`."""
    write_records(path, records[np.argsort(records["key"], kind="stable")])


def between(run: np.ndarray, first: int, end: int) -> np.ndarray:
    """Return the records of a run with first <= key < end."""
    keys = run["key"]
    begin = np.searchsorted(keys, np.uint64(first))
    stop = len(run) if end >= KEYS else np.searchsorted(keys, np.uint64(end))
    return run[begin:stop]


def read_range(paths: Sequence[Path], dtype: np.dtype, first: int = 0, end: int = KEYS) -> np.ndarray:
    """Return the records of all runs with first <= key < end, run after run."""
    found = [np.array(between(read_records(path, dtype), first, end)) for path in paths]
    return np.concatenate(found) if found else np.empty(0, dtype)


def share(number: int, of: int) -> tuple[int, int]:
    """Return one of several equal ranges of keys."""
    return KEYS * number // of, KEYS * (number + 1) // of


def ranges(paths: Sequence[Path], dtype: np.dtype, most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of keys in order, each with about `most` records of all runs together."""
    samples, total = [], 0
    for path in paths:
        run = read_records(path, dtype)
        step = max(1, len(run) // _SAMPLES)
        samples.append(np.array(run["key"][::step]))
        total += len(run)
    pieces = -(-total // most)
    keys = np.sort(np.concatenate(samples)) if samples else np.empty(0, np.uint64)
    cuts = sorted({int(keys[len(keys) * piece // pieces]) for piece in range(1, pieces)}) if pieces > 1 else []
    yield from zip([0, *cuts], [*cuts, KEYS], strict=True)
