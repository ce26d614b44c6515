"""Endless synthetic text: seeded Markov sources of several orders, to train, test and demonstrate without files.

Source i has order 1 + i % order. Its alphabet is small enough to learn its few hundred contexts within some thousand
tokens. Each context is followed by one of four letters, with the same probabilities in all sources. A model that has
learned everything reaches `FLOOR` nats per token; one that has learned nothing is at log(vocabulary).
"""

import hashlib
import math
from itertools import accumulate
from operator import getitem, itemgetter

import numpy as np

from megatron_blackmamba.data.datasets import DataError, WindowDataset

ODDS = (0.75, 0.15, 0.07, 0.03)
_UP_TO = np.cumsum(ODDS[:-1])
FLOOR = -sum(p * math.log(p) for p in ODDS)
HELD_OUT_SAMPLES = 256
_LETTERS_OF_ORDER = {1: 64, 2: 16, 3: 6}
_FEWEST_LETTERS = 5


class SyntheticDataset(WindowDataset):
    """One Markov source. Any sample can be computed alone, and held-out samples are of the same language."""

    def __init__(
        self,
        source: int,
        order: int,
        vocab_size: int,
        sequence_length: int,
        *,
        seed: int,
        samples: int,
        split: str,
    ) -> None:
        if vocab_size < _FEWEST_LETTERS:
            raise DataError(f"synthetic text needs a vocabulary of {_FEWEST_LETTERS} tokens, not {vocab_size}")
        self.order = order
        letters = min(_LETTERS_OF_ORDER.get(order, _FEWEST_LETTERS), vocab_size)
        fingerprint = f"synthetic 1: source {source}, order {order}, {letters} of {vocab_size} letters"
        super().__init__(f"synthetic_{source}", fingerprint, samples, sequence_length)
        self._seed, self._split = seed, split
        self._contexts = letters**order
        random = self._random("language")
        alphabet = random.permutation(vocab_size)[:letters].tolist()
        # Four different letters for each context: the places of a random row's smallest numbers.
        followers = random.random((self._contexts, letters)).argsort(axis=1)[:, : len(ODDS)]
        after = (np.arange(self._contexts)[:, None] * letters + followers) % self._contexts
        self._rows: list[list] = [[] for _ in range(self._contexts)]
        """A row for each context: the row of the next context for each draw, then the context's last letter."""
        for context, row in enumerate(self._rows):
            row += [self._rows[following] for following in after[context]]
            row.append(alphabet[context % letters])

    def window(self, index: int) -> np.ndarray:
        random = self._random(f"{self._split} {index}")
        draws = np.searchsorted(_UP_TO, random.random(self.sequence_length + 1), side="right")
        start = self._rows[int(random.integers(self._contexts))]
        rows = accumulate(draws.tolist(), getitem, initial=start)
        return np.fromiter(map(itemgetter(len(ODDS)), rows), np.int64, len(draws) + 1)[1:]

    def _random(self, purpose: str) -> np.random.Generator:
        key = f"{self._seed} {self.fingerprint} {purpose}".encode()
        digest = hashlib.blake2b(key, digest_size=16, person=b"synthetic").digest()
        return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, np.uint64)))
