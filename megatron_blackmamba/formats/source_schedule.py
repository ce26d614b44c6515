"""Compute which source serves sample k of a mixture, and how many samples it has served before, without a table.

Sources are the leaves of a Huffman tree over their probabilities. Of the first n samples at a node, round(n * share)
go left; so sample n goes left exactly when that number grows with it. A node is off by at most 1/2 sample, and this
error is scaled by every share below it.

At any prefix, a source is off by less than 1.68 samples in total, for any number of sources and any probabilities. The
reason: in a Huffman tree, node weights grow towards the root at least like the Fibonacci numbers, and half the sum of
their reciprocals is 1.68.

Nothing is stored, so the order has no fixed length: a longer run begins like a shorter one.
"""

import bisect
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

_BITS = 40  # precision of a share: its error is below 2^-41, a millionth of a sample in a million samples
_HALF_BITS = _BITS // 2
MAX_SAMPLES = 2**43  # more would overflow 64 bits; at 2,048 tokens a sample, 18 quadrillion tokens


def epochs_of(samples: int, sequence_length: int, tokens: int, before: int = 0) -> float:
    """Return how often samples of a source with so many tokens read each of them, after `before` tokens."""
    return (before + samples * sequence_length) / tokens


def repetition(epochs: Mapping[str, float | None]) -> str:
    """Return a warning that names the sources read more than once; empty if there are none.

    epochs: By source; None for a source that is not to be named.
    """
    often = ", ".join(f"{name} {times:,.2f} times" for name, times in epochs.items() if times and times > 1)
    return often and f"the run reads sources more than once: {often}. Set their max_epochs to accept or refuse that."


def most_samples(max_epochs: float, sequence_length: int, tokens: int, before: int = 0) -> int:
    """Return the largest number of samples with at most these epochs, `before` included, for the plan and training."""
    return max(0, int((Fraction(str(max_epochs)) * tokens - before) / sequence_length))


@dataclass(frozen=True)
class _Node:
    left: "_Node | int"
    right: "_Node | int"
    share: int
    """Fraction of the samples that go left, in units of 2^-40."""

    def to_left(self, samples):
        """Return how many of the first `samples` go left: round(samples * share), exact in 64 bits."""
        high = (samples >> _HALF_BITS) * self.share
        low = (samples & (2**_HALF_BITS - 1)) * self.share + 2 ** (_BITS - 1)
        return (high + (low >> _HALF_BITS)) >> _HALF_BITS


class Blend:
    """The order of the sources for fixed weights."""

    def __init__(self, weights: Sequence[Fraction | int], tie_break: Sequence[str] | None = None) -> None:
        """Build the tree; `tie_break` gives names that order sources of equal weight (default: their positions)."""
        if any(weight < 0 for weight in weights) or not any(weights):
            raise ValueError(f"weights must not be negative, and not all zero: {[str(w) for w in weights]}")
        self.sources = len(weights)
        total = Fraction(sum(weights))
        self.probabilities = [Fraction(weight) / total for weight in weights]
        names = tie_break or [f"{i:06}" for i in range(self.sources)]
        heap: list[tuple[Fraction, str, _Node | int]] = [
            (p, name, i) for i, (p, name) in enumerate(zip(self.probabilities, names, strict=True)) if p > 0
        ]
        heapq.heapify(heap)
        while len(heap) > 1:
            small_p, small_name, small = heapq.heappop(heap)
            large_p, large_name, large = heapq.heappop(heap)
            share = round(2**_BITS * large_p / (small_p + large_p))
            node = _Node(left=large, right=small, share=share)
            heapq.heappush(heap, (small_p + large_p, min(small_name, large_name), node))
        self._root = heap[0][2]

    def locate(self, sample: int) -> tuple[int, int]:
        """Return the source of a sample, and how many samples that source has served before."""
        node = self._root
        while isinstance(node, _Node):
            left = node.to_left(sample)
            if node.to_left(sample + 1) > left:
                node, sample = node.left, left
            else:
                node, sample = node.right, sample - left
        return node, sample

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` each source serves."""
        result = [0] * self.sources
        stack = [(self._root, samples)]
        while stack:
            node, n = stack.pop()
            if isinstance(node, _Node):
                left = node.to_left(n)
                stack += [(node.left, left), (node.right, n - left)]
            else:
                result[node] = n
        return result


class Schedule:
    """One blend per phase. Each source continues where the previous phase left it; nothing is repeated or skipped."""

    def __init__(
        self,
        weights: Sequence[Sequence[Fraction | int]],
        starts: Sequence[int] = (0,),
        tie_break: Sequence[str] | None = None,
    ) -> None:
        """Build the blends of all phases.

        Args:
            weights: Weights of all sources, per phase.
            starts: First sample of each phase; the first is 0.
        """
        if starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise ValueError(f"phases must start at 0 and then ever later, not at {list(starts)}")
        self.starts = list(starts)
        self.blends = [Blend(phase, tie_break) for phase in weights]
        self.sources = self.blends[0].sources
        self._before = [[0] * self.sources]  # samples of each source before each phase
        for blend, (start, end) in zip(self.blends, pairwise(starts), strict=False):
            self._before.append([a + b for a, b in zip(self._before[-1], blend.counts(end - start), strict=True)])

    def locate(self, sample: int) -> tuple[int, int]:
        """Return the source of a sample, and how many samples it has served before, over all phases."""
        sample = int(sample)
        if not 0 <= sample < MAX_SAMPLES:
            raise IndexError(f"sample {sample}: must be between 0 and {MAX_SAMPLES}")
        phase = bisect.bisect_right(self.starts, sample) - 1
        source, within = self.blends[phase].locate(sample - self.starts[phase])
        return source, within + self._before[phase][source]

    def sample_of(self, source: int, within: int, end: int) -> int | None:
        """Return the sample below `end` that is number `within` of a source; None if it comes later."""
        if not 0 <= within < self.counts(end)[source]:
            return None
        return bisect.bisect_left(range(end), within + 1, key=lambda sample: self.counts(sample + 1)[source])

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` each source serves."""
        phase = max(0, bisect.bisect_left(self.starts, samples) - 1)
        inside = self.blends[phase].counts(samples - self.starts[phase])
        return [a + b for a, b in zip(self._before[phase], inside, strict=True)]
