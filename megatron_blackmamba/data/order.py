"""The order in which a run reads the windows of a source, and where a text is in it: arithmetic, nothing is stored.

The windows of an epoch start at a token drawn for that epoch and go once around the ring of tokens. So texts are cut
elsewhere in every epoch, and the tail that does not fill a window (tokens modulo length) is not always the same text.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_blackmamba.data.permutation import Permutation
from megatron_blackmamba.formats.reads import SourceEpochs


@dataclass(frozen=True)
class Part:
    """The part of a text that a sample holds."""

    sample: int
    epoch: int
    first_token: int
    """Where in the text it begins."""
    tokens: int


class WindowOrder:
    """In every epoch each window once, in an order of that epoch's own, after what earlier runs have left of theirs."""

    def __init__(self, epochs: SourceEpochs, key: str) -> None:
        """Number the samples of a source; its content and the seed are a good key."""
        self.tokens, self.length, self.windows = epochs.tokens, epochs.length, epochs.windows
        self._key, self._left, self._first = key, epochs.left, epochs.first
        self._earlier: WindowOrder | None = None
        if epochs.left:
            self._earlier = WindowOrder(epochs.earlier, key)
            self._read, self._rest = epochs.reads[-1].samples, epochs.left // epochs.pieces
        self._epochs: dict[int, tuple[Permutation, int]] = {}

    def place(self, sample: int) -> int:
        """Return the position of the first token of a sample."""
        if self._earlier and sample < self._left:
            piece, window = divmod(sample, self._rest)  # neighbours come from different windows
            return (self._earlier.place(self._read + window) + piece * self.length) % self.tokens
        epoch, position = divmod(sample - self._left, self.windows)
        order, start = self._epoch(self._first + epoch)
        return (start + order[position] * self.length) % self.tokens

    def parts(self, place: int, tokens: int, end: int) -> Iterator[Part]:
        """Yield the parts of a text that the samples before `end` hold, their last label included."""
        if self._earlier:
            there = self._earlier.parts(place, tokens, self._read + self._rest)
            windows = {part.sample - self._read for part in there if part.sample >= self._read}
            for sample in (first + window for first in range(0, self._left, self._rest) for window in windows):
                if sample < end:
                    offset = (place - self.place(sample)) % self.tokens
                    for _, first, count in _windows(offset, tokens, self.length, 1, self.tokens):
                        yield Part(sample, self._first - 1, first, count)
        for epoch in range(-(-max(0, end - self._left) // self.windows)):
            order, start = self._epoch(self._first + epoch)
            offset = (place - start) % self.tokens  # where the text begins on the way around the ring
            for window, first, count in _windows(offset, tokens, self.length, self.windows, self.tokens):
                sample = self._left + epoch * self.windows + order.position_of(window)
                if sample < end:
                    yield Part(sample, self._first + epoch, first, count)

    def _epoch(self, epoch: int) -> tuple[Permutation, int]:
        """Return the order of an epoch's windows, and the position at which its first window starts."""
        known = self._epochs.get(epoch)
        if known is None:
            key = f"{self._key} {epoch}".encode()
            start = int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"start").digest(), "little")
            known = Permutation(self.windows, key), start % self.tokens
            self._epochs = {epoch: known, **dict(list(self._epochs.items())[:1])}  # readers cross an epoch's end
        return known


def _windows(offset: int, length: int, size: int, windows: int, tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yield the windows of an epoch that hold a part of a text: window, first token in the text, tokens.

    Window w holds the tokens w·size to w·size + size of the ring, its last label included. The text begins at
    token `offset` of the ring, and may leave the ring at its end and enter it again at its beginning.
    """
    for begin in (offset - tokens, offset, offset + tokens):
        for window in range(max(0, -(-(begin - size) // size)), min(windows - 1, (begin + length - 1) // size) + 1):
            first, end = max(begin, window * size), min(begin + length, window * size + size + 1)
            yield window, first - begin, end - first
