"""Account for what earlier runs have read of a source, and for how a run with another sequence length goes on.

A run reads the windows of an epoch in a random order, so half an epoch leaves gaps everywhere. A length that divides
the earlier run's cuts the windows that are left into pieces, and no token is read twice before the epoch ends. Any
other length needs windows of its own, and they hold both gaps and text that was read before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from megatron_blackmamba.formats.source_schedule import epochs_of, most_samples
from megatron_blackmamba.settings import Section


class Read(Section):
    """The reading of one run from a source."""

    sequence_length: int = Field(gt=0)
    samples: int = Field(gt=0)
    """Samples of that length."""


@dataclass(frozen=True)
class SourceEpochs:
    """The epochs of a source in a run, after those of earlier runs."""

    tokens: int
    """Of one epoch, which ends before a tail shorter than a window."""
    length: int
    """Of the run's sequences."""
    reads: Sequence[Read] = ()
    """What earlier runs have read, the first run first."""

    @property
    def windows(self) -> int:
        return self.tokens // self.length

    @property
    def pieces(self) -> int:
        """Return into how many samples a window of the earlier run is cut; 0 if the run does not continue its epoch."""
        if not self.reads or self.reads[-1].sequence_length % self.length:
            return 0
        return self.reads[-1].sequence_length // self.length

    @property
    def earlier(self) -> "SourceEpochs":
        """Return the epochs of the last of the earlier runs."""
        return SourceEpochs(self.tokens, self.reads[-1].sequence_length, self.reads[:-1])

    @property
    def left(self) -> int:
        """Return the samples that the run takes from windows of the earlier runs' epoch."""
        return self.earlier.after(self.reads[-1].samples)[0] * self.pieces if self.pieces else 0

    @property
    def first(self) -> int:
        """Return the number of the first epoch that is cut at the run's length."""
        return self.earlier.after(self.reads[-1].samples)[1] if self.pieces else 0

    def after(self, samples: int) -> tuple[int, int]:
        """Return the samples left of the epoch that this many samples end in, and the number of the epoch after it."""
        if samples <= self.left:
            return self.left - samples, self.first
        epochs, more = divmod(samples - self.left, self.windows)
        return (self.windows - more, self.first + epochs + 1) if more else (0, self.first + epochs)

    @property
    def tokens_before(self) -> int:
        """Return the tokens of all samples of earlier runs."""
        return sum(read.sequence_length * read.samples for read in self.reads)

    def epochs(self, samples: int) -> float:
        """Return how often this many samples and the earlier runs read each token, on average."""
        return epochs_of(samples, self.length, self.tokens, self.tokens_before)

    def most_samples(self, max_epochs: float) -> int:
        """Return the largest number of samples with at most these epochs in all."""
        return most_samples(max_epochs, self.length, self.tokens, self.tokens_before)

    def read_again(self, samples: int) -> float:
        """Return about how many tokens of these samples earlier runs have read in an epoch that they did not end."""
        share = 0.0 if self.pieces or not self.reads else 1 - self.earlier._unread(self.reads[-1].samples)
        return min(samples * self.length, self.tokens) * share

    def _unread(self, samples: int) -> float:
        """Return the share of an epoch that this run after these samples and all earlier ones have left unread."""
        left, _ = self.after(samples)
        here = left / self.windows if left else 1.0
        return here if self.pieces or not self.reads else here * self.earlier._unread(self.reads[-1].samples)


def reread(again: Mapping[str, tuple[float, int]]) -> str:
    """Return how much of its sources a run reads again; empty if nothing.

    again: Tokens that earlier runs have read in an epoch that they did not end, and all that the run reads, by source.
    """
    twice = [f"{tokens:,.0f} of {read:,} tokens of {name}" for name, (tokens, read) in again.items() if tokens]
    return f"text is read again before its epoch ends: about {', '.join(twice)}" if twice else ""


def refusal(length: int, again: str) -> str:
    """Return why a branch that reads text again is refused, and what to do."""
    return (
        f"sequences of {length} tokens cannot continue the trunk's epoch: {again}. Accept that with"
        " start.reread=true; or take a length that divides the trunk's; or read sources that the trunk has not read"
        " (data.mixture)"
    )
