"""Scores of a checkpoint: one JSON file, a record for each task and way of scoring, written after every task."""

import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.run_folder import RunFolder

FORMAT = 1
PAPER = ("hellaswag", "piqa", "winogrande", "lambada_openai", "arc_easy", "arc_challenge", "openbookqa", "boolq")
"""The tasks of the paper, in the order of its table; it plots BoolQ but has no figure for it."""
QUESTIONS = ("data", "task_version", "limit", "encoding")
"""What decides the questions of a task, among the fields of a key."""
CLAIM_SECONDS = 3600
"""A claim that is not renewed for this long is that of a process which was killed."""


class EvaluationFileError(ValueError):
    """A file of scores that cannot be read; names the file."""


class Encoding(str, Enum):
    """The way in which a context and its continuation become tokens."""

    joint = "joint"
    """Encode the whole text; the continuation is what follows the tokens of the context (lm-eval today)."""
    separate = "separate"
    """Encode each by itself (lm-eval 0.3.0, which the paper used)."""


@dataclass(frozen=True)
class ScoringKey:
    """All that decides a score. Equal keys have equal scores."""

    model: str
    """Hash of the checkpoint's manifest, or of an export's files; with another tokenizer, of that too."""
    task: str
    task_version: str
    data: str
    """sha256 of the data."""
    scorer: str
    """Versions of the scorer and of lm-eval."""
    precision: str
    encoding: str
    limit: int | None
    """Number of questions from the start; None: all."""
    max_length: int

    def asks(self, other: "ScoringKey") -> bool:
        """Return whether both keys have the same questions, asked in the same way."""
        return all(getattr(self, name) == getattr(other, name) for name in ("task", *QUESTIONS))


@dataclass(frozen=True)
class TaskResult:
    """The scores of one task."""

    key: ScoringKey
    metrics: Mapping[str, float]
    errors: Mapping[str, float]
    """Standard errors, by metric."""
    questions: int
    answers: Mapping[str, list[float]]
    """Each metric by question, in the order of the data, for paired comparisons."""
    seconds: float
    data_file: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    """Tokens and bytes of a text."""
    rows: Sequence[Mapping[str, float]] = ()
    """The table of a task that has one, such as the loss by position."""


@dataclass(frozen=True)
class Evaluation:
    """The scores of one model."""

    model: str
    """Path, for people."""
    step: int | None
    results: tuple[TaskResult, ...] = ()

    def find(self, key: ScoringKey) -> TaskResult | None:
        """Return the finished result of a key."""
        return next((result for result in self.results if result.key == key), None)

    def with_result(self, new: TaskResult) -> "Evaluation":
        """Return these scores and one more, which replaces a result with the same key."""
        kept = tuple(result for result in self.results if result.key != new.key)
        return Evaluation(self.model, self.step, (*kept, new))

    def by_task(self) -> dict[str, TaskResult]:
        """Return the best result of each task: on the most questions, the newest of those."""
        best: dict[str, TaskResult] = {}
        for result in self.results:
            known = best.get(result.key.task)
            if known is None or result.questions >= known.questions:
                best[result.key.task] = result
        return best

    def write(self, path: Path) -> None:
        """Write the file; a reader finds the old or the new one, never a part."""
        content = {"format": FORMAT, "model": self.model, "step": self.step, "results": [*map(asdict, self.results)]}
        atomic.write_text(path, json.dumps(content, ensure_ascii=False) + "\n")


def read_evaluation(path: Path) -> Evaluation:
    """Return the scores in a file, or raise EvaluationFileError."""
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise EvaluationFileError(f"{path}: format {content['format']!r}; this version reads format {FORMAT}")
        return Evaluation(content["model"], content["step"], tuple(map(_result, content["results"])))
    except EvaluationFileError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise EvaluationFileError(
            f"{path}: not a file of scores ({type(error).__name__}: {error}). Move it away to score again"
        ) from None


def read_run(run: Path) -> list[Evaluation]:
    """Return the readable scores of a run, by step."""
    found = []
    for path in sorted(RunFolder(run).evaluations.glob("step_*.json")):
        try:
            found.append(read_evaluation(path))
        except EvaluationFileError:
            continue
    return sorted(found, key=lambda evaluation: evaluation.step or 0)


@contextlib.contextmanager
def claim(run: Path, step: int) -> Iterator[Callable[[], None]]:
    """Protect a checkpoint from deletion while it is read; call the yielded function regularly to renew the claim."""
    folder = RunFolder(run).evaluations
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=_claims(step), dir=folder)  # one for each reader
    os.close(descriptor)
    marker = Path(name)

    def renew() -> None:
        with contextlib.suppress(OSError):  # the run's folder was moved, or its disk does not answer
            marker.touch()

    try:
        yield renew
    finally:
        with contextlib.suppress(OSError):  # it expires
            marker.unlink()


def is_claimed(run: Path, step: int) -> bool:
    """Return whether a process has claimed this checkpoint within the last CLAIM_SECONDS."""
    folder = RunFolder(run).evaluations
    markers = [*folder.glob(f"{_claims(step)}*")]
    return bool(markers) and max(map(_touched, markers)) > _now(folder) - CLAIM_SECONDS


def _claims(step: int) -> str:
    return f"step_{step:08d}.claim-"


def _touched(marker: Path) -> float:
    try:
        return marker.stat().st_mtime
    except OSError:
        return -math.inf


def _now(folder: Path) -> float:
    """Return the time by the clock that stamps files in `folder`, which may differ from this node's."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def _result(content: dict[str, Any]) -> TaskResult:
    known = {each.name for each in fields(TaskResult)}
    given = {name: value for name, value in content.items() if name in known}
    given |= {"key": ScoringKey(**content["key"]), "rows": tuple(content.get("rows", ()))}
    return TaskResult(**given)
