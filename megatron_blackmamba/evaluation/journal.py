"""Scores of an unfinished task on disk, so that a killed evaluation goes on where it was."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from megatron_blackmamba.evaluation.scoring import Batch, Score
from megatron_blackmamba.formats.evaluations import ScoringKey


class Journal:
    """A file with one line a batch: its scores. The first line is the key that the scores belong to."""

    def __init__(self, path: Path, key: ScoringKey, progress: Callable[[int, int], None]):
        """Open the journal; `progress` is called with the tokens scored and the total tokens."""
        self.path, self.progress = path, progress
        self._head = json.dumps(asdict(key), sort_keys=True)
        self._scored = self._all = 0

    def __enter__(self) -> "Journal":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = self._read()
        self._file = open(self.path, "w", encoding="utf-8")
        for line in (self._head, *map(json.dumps, self._lines)):
            self._file.write(f"{line}\n")
        self._file.flush()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._file.close()
        if kind is None:
            self.path.unlink(missing_ok=True)

    def known(self, batches: Sequence[Batch]) -> list[Score]:
        """Return the scores of an earlier, unfinished call."""
        scores = [Score(*score) for line in self._lines for score in line]
        found = {score.item for score in scores}
        self._all = sum(group.tokens for batch in batches for group in batch)
        self._scored = sum(
            sum(group.tokens for group in batch)
            for batch in batches
            if all(item.index in found for group in batch for item in group.items)
        )
        self.progress(self._scored, self._all)
        return scores

    def done(self, batch: Batch, scores: list[Score]) -> None:
        """Note the scores of a batch."""
        self._file.write(json.dumps(scores) + "\n")
        self._file.flush()
        self._scored += sum(group.tokens for group in batch)
        self.progress(self._scored, self._all)

    @property
    def rows(self) -> list:
        """Return the rows of an earlier, unfinished call, of a task that has rows instead of batches."""
        return self._lines

    def add(self, row: list, done: int, total: int) -> None:
        """Note one row of such a task."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self.progress(done, total)

    def _read(self) -> list[list]:
        """Return the batches of a file with the same key; a last line that was cut short is left out."""
        try:
            head, *lines = self.path.read_text(encoding="utf-8").split(os.linesep)
        except (OSError, ValueError):
            return []
        found = []
        for line in lines if head == self._head else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return found
