"""Events of a run, one JSON object a line in events.jsonl. A kind of event is a class: its fields and its sentence.

`{"time": "2026-01-31T12:00:00.000+00:00", "step": 120, "kind": "saved"}`: when it happened, the step that it is about,
the kind, and the fields of the kind. The lines of log.txt and the report are made from events.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from typing_extensions import dataclass_transform

from megatron_blackmamba.formats.step_records import records_in

Samples = Sequence[Sequence[int]]
"""First and last sample of each range."""
KINDS: dict[str, type["Event"]] = {}


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a run. A subclass is a kind; its name in the file is the class's in snake case."""

    kind: ClassVar[str]
    remark: ClassVar[bool] = False
    """List it among the report's interruptions."""
    repeats: ClassVar[bool] = False
    """It happens again where an interrupted run repeats the step."""

    step: int | None = None
    """The step that it is about; the loggers fill in the last step taken."""

    says: ClassVar[str] = ""
    """The text, with the fields in braces; a kind with more to say has its own `text`."""

    def __init_subclass__(cls, remark: bool = False) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        cls.remark = cls.remark or remark
        cls.kind = re.sub(r"(?<=.)(?=[A-Z])", "_", cls.__name__).lower()
        if not cls.__name__.startswith("_"):
            KINDS[cls.kind] = cls

    @property
    def text(self) -> str:
        """Describe the event; the step may be left out."""
        return self.says.format(**vars(self))

    @property
    def sentence(self) -> str:
        """Return the text for log.txt, usually one line."""
        return self.text

    def to_json(self, time: datetime) -> str:
        """Return the line of events.jsonl without its newline."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "step"}
        head = {"time": time.astimezone().isoformat(timespec="milliseconds"), "step": self.step, "kind": self.kind}
        return json.dumps(head | fields, ensure_ascii=False)


# Beginning and end


class _Begun(Event):
    tokens_per_step: int
    processes: int | None = None
    device: str = ""
    parameters: int | None = None
    active: int | None = None


class Started(_Begun):
    """The run begins at its first step."""

    steps: int
    weights_from: str | None = None
    unused_rows: int = 0
    """Rows of the vocabulary that no token of the data has, beyond usual padding."""

    @property
    def text(self) -> str:
        weights = f" from the weights of {self.weights_from}" if self.weights_from else ""
        line = f"starts{weights}: {self.steps} step{'s' * (self.steps != 1)} of {self.tokens_per_step} tokens"
        unused = f"note: {self.unused_rows} rows of model.vocab_size are never used: the tokenizer has fewer tokens"
        return "\n".join([line, unused] if self.unused_rows else [line])


class Branched(_Begun):
    """The run begins at a checkpoint of another run."""

    trunk: str
    """The checkpoint."""
    sample: int
    consumed_samples: int
    steps_left: int
    relength: bool = False
    """The run has another sequence length, and begins its data anew."""
    mixture: str | None = None
    """The mixture that was composed of the trunk's and the run's own."""
    changes: Sequence[str] = field(default_factory=list)
    """What decides the weights and differs from the trunk."""
    protected: bool = True
    """The trunk keeps the checkpoint until the branch has one of its own."""

    @property
    def text(self) -> str:
        line = f"branches from {self.trunk}: {self.steps_left} steps of {self.tokens_per_step} tokens to go"
        reads = f"; reads {self.mixture}" if self.mixture else ""
        lost = "note: the trunk may delete that checkpoint: its folder cannot be written to"
        return "\n".join([line + reads, *self.changes, *([] if self.protected else [lost])])


class Kernels(Event):
    """The kernels that this run uses on GPUs."""

    in_use: Sequence[str]
    """Op, backend, and why not a better one."""
    problem: str = ""
    """Why none of this project's GPU kernels can run."""

    @property
    def text(self) -> str:
        slow = "WARNING: operations of PyTorch replace the Triton kernels, several times slower"
        fallback = [f"{slow}: {self.problem}"] if self.problem else []
        return "\n".join([*fallback, "kernels", *(f"  {line}" for line in self.in_use)])


class CudaGraph(Event):
    """A run captures micro-batches as one launch, or says why not."""

    news: str
    says = "kernels.cuda_graph: {news}"


class RoutingDependsOnLayout(Event):
    """Another layout of this run would choose other experts in training."""

    reason: str
    says = "note: {reason}"


class Resumed(_Begun):
    """The run continues from a checkpoint."""

    sample: int
    steps_left: int
    changes: Sequence[str] = field(default_factory=list)
    """Changes of the config that resume.allow permits by name, or that change the routing."""

    @property
    def text(self) -> str:
        to_go = f"{self.steps_left} steps of {self.tokens_per_step} tokens to go"
        return "\n".join([f"resumes after step {self.step}, at sample {self.sample}, {to_go}", *self.changes])


class _Ended(Event):
    saved: bool
    """The last step is in a checkpoint."""

    @property
    def where(self) -> str:
        return f"at step {self.step}" + ("" if self.saved else ", which is not saved")

    @property
    def text(self) -> str:
        return f"{self.says} {self.where}"


class Done(_Ended):
    """All tokens are consumed."""

    says = "done"


class Stopped(_Ended):
    """The run ends early, for a request, training.stop_after_steps or a failed last save."""

    on_request: bool
    steps_left: int

    @property
    def text(self) -> str:
        if self.on_request or not self.saved:
            return f"stops {'on request ' if self.on_request else ''}{self.where} (the same command resumes it)"
        return f"stops {self.where}, as training.stop_after_steps says; {self.steps_left} steps of the run are left"


class GaveUp(_Ended):
    """The guard ends the run."""

    says = "gives up"


class Failed(Event):
    """An error ends the run."""

    error: str
    message: str

    says = "fails after step {step}: {error}: {message}"


# Steps


class _Judged(Event, remark=True):
    repeats: ClassVar[bool] = True

    reason: str
    action: str
    """apply, skip, rewind or stop."""
    samples: Samples
    """Those of the batch; when the run stops, those of the whole streak of bad steps."""

    @property
    def text(self) -> str:
        return f"{self.reason}; {self.action}; samples {ranges(self.samples)}"

    @property
    def sentence(self) -> str:
        return f"step {self.step}: {self.text}"


class NotFinite(_Judged):
    """The loss or the gradient norm of a step is not finite, also when it runs again."""


class DeviceFailed(_Judged):
    """A step is not finite at first, but finite when it runs again."""


class Spike(_Judged):
    """The loss of a step is far above that of the steps before."""


class ReplicasDiffer(_Judged):
    """Ranks hold different values of one weight."""


class Rewound(Event):
    """The run goes back from `step` to the checkpoint of step `to`."""

    to: int
    passed_over: Samples = field(default_factory=list)
    """Samples that the run does not read again."""

    @property
    def text(self) -> str:
        return f"rewound to step {self.to}" + (f", past samples {ranges(self.passed_over)}" if self.passed_over else "")


class NotRewound(Event, remark=True):
    """The guard asks for a rewind, and there is no checkpoint, or rewinding to it did not help."""

    checkpoint: int | None = None
    times: int = 0
    """How often the run was rewound to the checkpoint."""
    new_level: bool = False
    """The loss has a new level, and training continues."""

    @property
    def text(self) -> str:
        if self.checkpoint is None:
            return "no checkpoint to rewind to yet"
        end = ": a new level of the loss, and the next steps count" if self.new_level else ", and that did not help"
        return f"rewound to step {self.checkpoint} {self.times} times (training.guard.max_spikes){end}"


class SlowRank(Event, remark=True):
    """A rank stays slower than the others, or waits longer for data."""

    rank: int
    host: str
    steps: int
    """Length of the window."""
    over_median: float | None = None
    """Time of its layers over that of the median rank, if that is what is slow."""
    late_seconds: float | None = None
    """Time of a step that it waits longer for data, if that is what is slow."""

    @property
    def text(self) -> str:
        if self.over_median is not None:
            why = f"its layers take {self.over_median:.2f} times as long as those of the median rank"
        else:
            why = f"it waits {self.late_seconds or 0:.3f} s a step longer for data than the median rank"
        over = f"over the last {self.steps} steps (training.guard.slow_ratio)"
        return f"rank {self.rank} ({self.host}) is slow: {why}, {over}"


class RankRecovered(Event, remark=True):
    """A slow rank is as fast as the others again."""

    rank: int
    host: str

    says = "rank {rank} ({host}) is no longer slow"


class Traced(Event):
    """A trace of some steps is written."""

    first: int
    last: int
    path: str

    says = "traced steps {first} to {last}: {path}"


# Checkpoints


class Saved(Event):
    """The checkpoint of `step` is on disk."""

    says = "saved step {step}"


class NotSaved(Event, remark=True):
    """A checkpoint could not be saved."""

    problem: str
    disk: str = ""
    """Free space at the time, and the size of a checkpoint; empty if the weights are not finite."""
    retried: bool = True
    """The save is tried again. The last attempt of a run is not, nor are weights that are not finite."""
    newest: int = 0
    """Step of the newest checkpoint; 0 if there is none."""
    attempts: int = 1

    @property
    def text(self) -> str:
        stays = f"the one of step {self.newest} stays" if self.newest else "there is none before it"
        if not self.retried and not self.disk:
            return f"not saved: {self.problem}; a run cannot continue from such weights; {stays}"
        if self.attempts > 1:
            return f"the last checkpoint could not be saved, tried again {self.attempts - 1} times; {stays}"
        why = "; ".join(filter(None, [self.problem, self.disk]))
        again = ", and the save is tried again" if self.retried else ""
        return f"a checkpoint could not be saved ({why}); {stays}{again}"


class Exported(Event):
    """The Hugging Face export of `step` is on disk; training waited `seconds` for it."""

    seconds: float

    says = "exported step {step} in {seconds:.1f} s"


class NotExported(Event, remark=True):
    """The Hugging Face export of `step` could not be written, or the installed transformers does not load it."""

    problem: str

    says = "step {step} has no usable export ({problem}); training goes on"


class NotScored(Event, remark=True):
    """The checkpoint of `step` could not be scored (evaluation.every)."""

    problem: str

    says = "step {step} has no complete scores ({problem}); training goes on"


class Damaged(Event, remark=True):
    """The checkpoint of `step` is damaged and set aside."""

    folder: str
    problem: str

    @property
    def text(self) -> str:
        return f"skips a damaged checkpoint{', now ' if self.folder else ''}{self.folder}: {self.problem}"


class NotRemoved(Event):
    """Old checkpoints could not be removed."""

    problem: str

    says = "old checkpoints could not be removed: {problem}"


# Data and logs


class ShardsVerified(Event):
    """All token shards were compared with their manifests."""

    shards: int

    says = "all shards match their manifests ({shards})"


class ShardsUnverified(Event):
    """A job of ten minutes or more ends before all token shards were compared with their manifests."""

    pending: int
    shards: int
    mixture: str = "MIXTURE"

    @property
    def text(self) -> str:
        left = f"{self.pending} of {self.shards} shards were not compared with their manifests yet"
        return f"note: {left}; `blackmamba data verify {self.mixture}` does it now"


class LoggingProblem(Event):
    """A log is damaged, incomplete or switched off, or a file of the run folder was removed."""

    problem: str

    says = "{problem}"


# Reading


@dataclass(frozen=True)
class Occurrence:
    """An event and its time."""

    time: datetime
    event: Event


def read_events(path: str | Path) -> Iterator[Occurrence]:
    """Yield the events of a run in order. Skip damaged lines and kinds that this version does not know."""
    for fields in records_in(Path(path), parse_line):
        if event := _event(fields):
            yield Occurrence(datetime.fromisoformat(fields["time"]), event)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line of events.jsonl, or None if it is cut short or damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        fields = json.loads(line)
        datetime.fromisoformat(fields["time"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    known = isinstance(fields.get("kind"), str) and isinstance(fields.get("step"), int | None)
    return fields if known else None


Of = TypeVar("Of", bound=Event)


def of_kind(events: Sequence[Event], kind: type[Of]) -> list[Of]:
    """Return the events of one kind."""
    return [event for event in events if isinstance(event, kind)]


def ranges(samples: Samples) -> str:
    """Return ranges of samples as `0–15, 32–47`."""
    return ", ".join(f"{first}–{last}" for first, last in samples)


_FORMER = {("rewound", "skipped"): "passed_over"}  # names of fields in files of older versions


def _event(fields: dict[str, Any]) -> Event | None:
    if (kind := KINDS.get(fields["kind"])) is None:
        return None
    names = {each.name for each in dataclasses.fields(kind)}
    fields = {_FORMER.get((kind.kind, name), name): value for name, value in fields.items()}
    try:
        return kind(**{name: value for name, value in fields.items() if name in names})
    except TypeError:  # a field is missing: another version's
        return None
