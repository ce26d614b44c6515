"""Find the samples that each step of a run read, from its records, including resumes, rewinds and skipped ranges."""

import bisect
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_blackmamba.formats.events import Event, Rewound, of_kind, read_events
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.formats.step_records import metrics_so_far


class TraceError(ValueError):
    """A trace that a run's files do not allow; the message says what is missing."""


class Steps:
    """The steps of a run in order, and the samples that each of them read."""

    def __init__(self, records: Iterable[dict[str, Any]], events: Sequence[Event], name: str = "the run") -> None:
        """Index the lines of metrics.jsonl (`records`) and of events.jsonl (`events`, for ranges that rewinds skip)."""
        self.name = name
        self._steps, self._ends, self._consumed = array("q"), array("q"), array("q")
        for record in records:
            if "next_sample" not in record:
                raise TraceError(
                    f"{name}: step {record['step']} has no next_sample in metrics.jsonl: an older version wrote it. "
                    "Trace the samples that an event names with --samples FIRST-LAST"
                )
            self._steps.append(record["step"])
            self._ends.append(record["next_sample"])
            self._consumed.append(record["consumed_samples"])
        self._judged = [int(last) for event in events for _, last in getattr(event, "samples", ())]
        self._skipped = [(int(a), int(b)) for event in of_kind(events, Rewound) for a, b in event.skipped]

    @classmethod
    def of_run(cls, run: Path) -> "Steps":
        folder = RunFolder(run)
        return cls(metrics_so_far(folder.metrics), [each.event for each in read_events(folder.events)], str(run))

    @property
    def end(self) -> int:
        """Return the first sample that no step has read."""
        return self._ends[-1] if self._ends else 0

    def refuse_unread(self, samples: Sequence[int]) -> None:
        """Refuse samples that no step has read, nor any step that a rewind discarded."""
        end = max([self.end, *(last + 1 for last in self._judged)])
        if samples[-1] >= end:
            known = f"samples 0 to {end - 1}" if end else "no sample"
            raise TraceError(f"{self.name}: sample {samples[-1]} has not been read: the run has read {known} so far")

    def samples_of(self, step: int) -> list[int]:
        """Return the samples of a step's batch in the order of the batch."""
        at = bisect.bisect_left(self._steps, step)
        if at == len(self._steps) or self._steps[at] != step:
            known = f"steps {self._steps[0]} to {self._steps[-1]}" if self._steps else "no step"
            raise TraceError(f"{self.name}: step {step} is not in metrics.jsonl, which has {known}")
        if step > 1 and (at == 0 or self._steps[at - 1] != step - 1):
            raise TraceError(f"{self.name}: step {step - 1} is missing in metrics.jsonl, so step {step} has no start")
        first, end = (self._ends[at - 1] if at else 0), self._ends[at]
        count = self._consumed[at] - (self._consumed[at - 1] if at else 0)
        samples = list(range(first, end)) if end - first == count else self._unskipped(first, end)
        if len(samples) != count:
            raise TraceError(
                f"{self.name}: step {step} read {count} samples of {first} to {end - 1}, and events.jsonl does not say "
                "which. Trace samples by number instead: --samples FIRST-LAST"
            )
        return samples

    def step_of(self, sample: int) -> int | None:
        """Return the step that read a sample; None if none did."""
        at = bisect.bisect_right(self._ends, sample)
        if at == len(self._ends) or sample < 0:
            return None
        step = self._steps[at]
        return step if sample in self.samples_of(step) else None

    def _unskipped(self, first: int, end: int) -> list[int]:
        return [n for n in range(first, end) if not any(a <= n <= b for a, b in self._skipped)]
