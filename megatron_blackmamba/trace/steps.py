"""Find the samples that each step of a run read, from its records, including resumes, rewinds and skipped ranges."""

import bisect
import shlex
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from megatron_blackmamba.formats.branches import trunk_of, trunks_of
from megatron_blackmamba.formats.events import Event, Rewound, of_kind, read_events
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.formats.step_records import metrics_so_far


class TraceError(ValueError):
    """A trace that a run's files do not allow; the message says what is missing."""


class Steps:
    """The steps of a run in order, and the samples that each of them read."""

    def __init__(
        self,
        records: Iterable[dict[str, Any]],
        events: Sequence[Event],
        name: str = "the run",
        begins: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """Index the lines of metrics.jsonl (`records`) and of events.jsonl (`events`, for ranges that rewinds skip).

        begins: Step, next sample and consumed samples before the first record; those of a trunk for a branch.
        """
        self.name, self.begins = name, begins
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
        self._passed_over = [(int(a), int(b)) for event in of_kind(events, Rewound) for a, b in event.passed_over]

    @classmethod
    def of_run(cls, run: Path) -> "Steps":
        """Return the steps of a run, with those of its trunks before it where both number samples in the same way."""
        folder = RunFolder(run)
        records, events = [metrics_so_far(folder.metrics)], _events(folder)
        for trunk in takewhile(lambda trunk: not trunk.relength, trunks_of(folder)):
            folder = trunk.run
            records.insert(0, takewhile(_up_to(trunk.step), metrics_so_far(folder.metrics)))
            events = [event for event in _events(folder) if _is_before(event, trunk.sample)] + events
        before = trunk_of(folder)  # which has a numbering of its own, or is gone
        begins = (before.step, before.sample, before.consumed_samples) if before else (0, 0, 0)
        return cls(chain.from_iterable(records), events, str(run), begins)

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
        first_step, first_sample, consumed = self.begins
        if step <= first_step:
            trunk = trunk_of(RunFolder(Path(self.name)))
            where = f"blackmamba data trace {shlex.quote(str(trunk.run.root))} --step {step}" if trunk else "its trunk"
            raise TraceError(
                f"{self.name}: branches from another run after step {first_step}, which took step {step}. Ask that run:"
                f" {where}"
            )
        at = bisect.bisect_left(self._steps, step)
        if at == len(self._steps) or self._steps[at] != step:
            known = f"steps {self._steps[0]} to {self._steps[-1]}" if self._steps else "no step"
            raise TraceError(f"{self.name}: step {step} is not in metrics.jsonl, which has {known}")
        if step > first_step + 1 and (at == 0 or self._steps[at - 1] != step - 1):
            raise TraceError(f"{self.name}: step {step - 1} is missing in metrics.jsonl, so step {step} has no start")
        first, end = (self._ends[at - 1] if at else first_sample), self._ends[at]
        count = self._consumed[at] - (self._consumed[at - 1] if at else consumed)
        samples = list(range(first, end)) if end - first == count else self._unskipped(first, end)
        if len(samples) != count:
            raise TraceError(
                f"{self.name}: step {step} read {count} samples of {first} to {end - 1}, and events.jsonl does not say "
                "which. Trace samples by number instead: --samples FIRST-LAST"
            )
        return samples

    def step_of(self, sample: int) -> int | None:
        """Return the step that read a sample; None if none did, or one of a trunk that is gone."""
        at = bisect.bisect_right(self._ends, sample)
        if at == len(self._ends) or sample < self.begins[1]:
            return None
        step = self._steps[at]
        return step if sample in self.samples_of(step) else None

    def _unskipped(self, first: int, end: int) -> list[int]:
        return [n for n in range(first, end) if not any(a <= n <= b for a, b in self._passed_over)]


def _events(folder: RunFolder) -> list[Event]:
    return [each.event for each in read_events(folder.events)]


def _is_before(event: Event, sample: int) -> bool:
    """Return whether an event is not about samples from one on, which a trunk has read after its branch."""
    return all(last < sample for name in ("samples", "passed_over") for _, last in getattr(event, name, ()))


def _up_to(step: int) -> Callable[[dict[str, Any]], bool]:
    return lambda record: record["step"] <= step
