"""A keyed permutation of range(n), computed one position at a time: a shuffle without memory or start-up cost.

It is a Feistel network on a grid of rows × columns slightly larger than n. Each round shifts one coordinate by a keyed
hash of the other. The shift is invertible, so every round is a bijection of the grid. Positions that fall outside
range(n) pass through the network again (cycle walking); with a nearly square grid that is one in sqrt(n).
"""

import hashlib
import math

ROUNDS = 8  # coordinates moved; four is where such networks begin to look random, small n wants some more
_MASK = 2**64 - 1


class Permutation:
    """A permutation of range(size) that depends only on its key, on every machine and in every version."""

    def __init__(self, size: int, key: bytes) -> None:
        if not 0 < size < 2**62:
            raise ValueError(f"a permutation needs between 1 and 2^62 positions, not {size}")
        self.size = size
        self._rows = math.isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
        digest = hashlib.blake2b(key, digest_size=8 * ROUNDS, person=b"permutation").digest()
        self._round_keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS)]

    def __getitem__(self, position: int) -> int:
        position = int(position)
        if not 0 <= position < self.size:
            raise IndexError(f"position {position} of a permutation of {self.size}")
        place = self._once(position)
        while place >= self.size:
            place = self._once(place)
        return place

    def position_of(self, place: int) -> int:
        """Return the position that goes to `place`: the inverse of indexing."""
        place = int(place)
        if not 0 <= place < self.size:
            raise IndexError(f"place {place} of a permutation of {self.size}")
        position = self._once_back(place)
        while position >= self.size:
            position = self._once_back(position)
        return position

    def _once(self, x: int) -> int:
        row, column = x // self._columns, x % self._columns
        for i in range(0, ROUNDS, 2):
            row = (row + _hash(column, self._round_keys[i], self._rows)) % self._rows
            column = (column + _hash(row, self._round_keys[i + 1], self._columns)) % self._columns
        return row * self._columns + column

    def _once_back(self, x: int) -> int:
        row, column = x // self._columns, x % self._columns
        for i in range(ROUNDS - 2, -1, -2):
            column = (column - _hash(row, self._round_keys[i + 1], self._columns)) % self._columns
            row = (row - _hash(column, self._round_keys[i], self._rows)) % self._rows
        return row * self._columns + column


def _hash(x: int, key: int, below: int) -> int:
    """Mix 64 bits (splitmix64's finaliser), scale the upper half to range(below)."""
    x = (x + key) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (((x ^ (x >> 31)) >> 32) * below) >> 32
