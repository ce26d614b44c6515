"""The progress of a run: its step, and separately the index of the next sample in the data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_blackmamba.config import RunConfig


@dataclass
class Progress:
    """The progress of a run, saved as JSON in every checkpoint."""

    step: int = 0
    """Number of steps taken, including skipped ones."""
    next_sample: int = 0
    """Index, in the order of the data, of the first sample not yet read."""
    consumed_samples: int = 0
    """Samples in the batches of all steps: the learning rate follows it. Ranges passed over are not in it."""
    passed_over: list[tuple[int, int]] = field(default_factory=list)
    """First and last sample of each range that rewinds pass over."""

    last_batch: tuple[int, int] = (0, 0)
    """First sample of the batch of the last step, and the one after its last; not saved."""

    def advance(self, next_sample: int, samples: int) -> None:
        """Count one step with a batch of `samples`."""
        self.step += 1
        self.last_batch = (self.next_sample, next_sample)
        self.next_sample = next_sample
        self.consumed_samples += samples

    def between(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the first and last sample of each range read from `first` up to, but excluding, `end`."""
        spans, start = [], first
        for skip_first, skip_last in sorted(self.passed_over):
            if first <= skip_last and skip_first < end:
                if start < skip_first:
                    spans.append((start, skip_first - 1))
                start = max(start, skip_last + 1)
        if start < end:
            spans.append((start, end - 1))
        return spans

    def end_of_data(self, config: RunConfig) -> int:
        """Return the index behind the last sample of the run."""
        return self.end_after(config.samples_left(self.consumed_samples))

    def end_after(self, samples: int) -> int:
        """Return the index behind the last sample if `samples` more are read: skipped ranges ahead count."""
        if not samples:
            return self.next_sample
        end, seen = self.next_sample + samples, self.next_sample
        for first, last in sorted(self.passed_over):
            if first < end and seen <= last:
                end += last - max(first, seen) + 1
                seen = last + 1
        return end

    def at_length(self, before: int, now: int, next_sample: int = 0) -> "Progress":
        """Return this progress for sequences of another length: as many tokens consumed, and samples of its own."""
        return Progress(self.step, next_sample, -(-self.consumed_samples * before // now))

    def state(self) -> dict[str, Any]:
        saved = {"step": self.step, "next_sample": self.next_sample, "consumed_samples": self.consumed_samples}
        return {**saved, "passed_over": [list(span) for span in self.passed_over]}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Progress":
        return cls(**{**state, "passed_over": [(first, last) for first, last in state["passed_over"]]})
