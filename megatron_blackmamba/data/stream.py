"""The tokens of many shards as one ring, cut into windows: start-up and memory depend on shards, never on documents.

megatron-core's IndexedDataset reads the same files a document at a time, and needs an entry a document to know what
lies where. A window is a range of tokens, and a range needs only its beginning: documents follow each other inside it
as they do in the file, each closed by its EOD.
"""

import bisect
import mmap
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from megatron_blackmamba.data.open_files import allow_open_files
from megatron_blackmamba.formats.shards import Shard


class TokenStream:
    """All tokens of some shards, memory-mapped, in the given order."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = [part for part in parts if len(part)]
        self._ends = list(accumulate(len(part) for part in self._parts))
        self.tokens = self._ends[-1] if self._ends else 0

    @classmethod
    def of_shards(cls, shards: Sequence[Shard]) -> "TokenStream":
        allow_open_files(len(shards))
        return cls([_map(shard) for shard in shards])

    def __len__(self) -> int:
        return self.tokens

    def read(self, start: int, length: int) -> np.ndarray:
        """`length` tokens from `start`, as int64; after the last token comes the first again."""
        window = np.empty(length, np.int64)
        part = bisect.bisect_right(self._ends, start)
        inside = start - (self._ends[part] - len(self._parts[part]))
        filled = 0
        while filled < length:
            piece = self._parts[part][inside : inside + length - filled]
            window[filled : filled + len(piece)] = piece
            filled += len(piece)
            part, inside = (part + 1) % len(self._parts), 0
        return window


def _map(shard: Shard) -> np.ndarray:
    """The shard's tokens, mapped for reading here and there: else the kernel reads ahead megabytes for every window."""
    if not shard.manifest.tokens:  # nothing to map
        return np.empty(0, shard.manifest.dtype)
    with open(shard.bin_path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, shard.manifest.dtype)
