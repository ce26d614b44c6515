"""The tokens of many shards as one ring, cut into windows: start-up and memory depend on shards, not on documents.

megatron-core's IndexedDataset reads the same files one document at a time, and needs an index entry per document. A
window is a range of tokens, so its start is enough. Inside it, documents follow each other as in the file, each ended
by its EOD.
"""

import bisect
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from megatron_blackmamba.data.open_files import allow_open_files
from megatron_blackmamba.formats.shards import Shard, ShardError, TokenFile, check_idx


class TokenStream:
    """All tokens of some shards, in the given order."""

    def __init__(self, parts: Sequence[np.ndarray | TokenFile], shards: Sequence[Shard] = ()) -> None:
        """Join the parts; with their `shards`, token ids outside the vocabulary are found and named."""
        self._parts = [part for part in parts if len(part)]
        self.shards = [shard for shard in shards if shard.manifest.tokens]
        self._vocab_size = max((shard.manifest.vocab_size for shard in shards), default=None)
        self._ends = list(accumulate(len(part) for part in self._parts))
        self.tokens = self._ends[-1] if self._ends else 0

    @classmethod
    def of_shards(cls, shards: Sequence[Shard]) -> "TokenStream":
        allow_open_files(len(shards))
        return cls([shard.token_ids for shard in shards], shards)

    def __len__(self) -> int:
        return self.tokens

    def read(self, start: int, length: int) -> np.ndarray:
        """Return `length` tokens from `start`, as int64; after the last token comes the first again."""
        window = np.empty(length, np.int64)
        part = bisect.bisect_right(self._ends, start)
        inside = start - (self._ends[part] - len(self._parts[part]))
        filled = 0
        while filled < length:
            piece = self._parts[part][inside : inside + length - filled]
            window[filled : filled + len(piece)] = piece
            filled += len(piece)
            part, inside = (part + 1) % len(self._parts), 0
        if self._vocab_size is not None and np.max(window.view(np.uint64)) >= self._vocab_size:  # or negative
            self._refuse(window, start, self._vocab_size)
        return window

    def locate(self, place: int) -> tuple[Shard, int]:
        """Return the shard of a token, and its place there."""
        part = bisect.bisect_right(self._ends, place)
        return self.shards[part], place - (self._ends[part] - len(self._parts[part]))

    def start_of(self, shard: Shard) -> int:
        """Return the place of a shard's first token."""
        part = self.shards.index(shard)
        return self._ends[part] - len(self._parts[part])

    def _refuse(self, window: np.ndarray, start: int, vocab_size: int) -> None:
        """Name the first id outside the vocabulary. On a GPU the embedding would fail without saying which it was."""
        at = int(np.argmax(window.view(np.uint64) >= vocab_size))
        shard, place = self.locate((start + at) % self.tokens)
        raise ShardError(
            f"{shard.bin_path}: token {place} ({_document_at(shard, place)}; position {at} of its sample) is "
            f"{window[at]}, but ids end at {shard.manifest.vocab_size - 1}: the file was changed or damaged. "
            f"Put it back; `blackmamba data verify {shard.prefix}` checks it"
        )


def _document_at(shard: Shard, place: int) -> str:
    try:
        check_idx(shard.idx, bin_bytes=shard.manifest.bin_bytes)
    except (ShardError, OSError):
        return "the index is damaged too"
    return f"document {shard.document_at(place)}"
