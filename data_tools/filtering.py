"""Quality filters: each document passes the rules of a recipe, and every removal and change is counted and shown."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

try:
    from datatrove.pipeline.base import PipelineStep
except ImportError:  # said by `require_datatrove`
    PipelineStep = object

from megatron_blackmamba.data_tools.cleaning import Cleaning, Stage
from megatron_blackmamba.data_tools.filter_tally import REPORT, Tally, report
from megatron_blackmamba.data_tools.parts import (
    ADDED,
    ORIGIN,
    REST,
    Listing,
    PartWriter,
    RemovalLog,
    Row,
    first_documents,
    read_notes,
    reading,
)
from megatron_blackmamba.data_tools.recipes import Rule
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.formats import atomic

PARTS = "parts"
"""The folder in which the parts wait until their number is known to be allowed."""
CHECKED_FIRST = 1000
"""Documents that are read before the work for --at-most."""
ABSENT = "(none)"
"""The source of documents without the field of --by."""


class Judge:
    """The rules, and the tally of what they do."""

    def __init__(self, rules: Sequence[Rule], by: str | None) -> None:
        self.rules, self.by = rules, by
        self.tally = Tally()

    def keeps(self, document: Any) -> bool:
        """Apply the rules to a document in order; return whether it is kept. Its text may change."""
        where = {key: document.metadata[key] for key in ("file", "record")}
        source, before, changed = self._source(document), len(document.text), []
        for rule in self.rules:
            text = document.text
            reason = rule.check(document) or (None if document.text.strip() else "no text left")
            self.tally.reached[rule.name] += 1
            if reason is not None:
                document.metadata["reason"] = f"{rule.name}: {reason}"
                self.tally.remove(rule.name, reason, where, text)
                self.tally.count(source, before, None)
                return False
            if document.text != text:
                changed.append((rule.name, text, document.text, document.metadata.pop("replaced", {})))
        for name, old, new, replaced in changed:
            self.tally.change(name, where, old, new, replaced)
        self.tally.count(source, before, len(document.text), changed=bool(changed))
        found = document.metadata.get("found", {}) | ({"changed_by": [each[0] for each in changed]} if changed else {})
        if found:
            document.metadata[ADDED] = {"filter": found}
        return True

    def _source(self, document: Any) -> str:
        """Return the name under which a document is counted: of a field, else of its folder or file."""
        if self.by is None:
            name = document.metadata[ORIGIN]["file"]
            return os.path.dirname(name) or name
        value: Any = document.metadata[REST]
        for step in self.by.split("."):
            value = value.get(step) if isinstance(value, dict) else None
        return ABSENT if value is None else str(value)


class _Filters(PipelineStep):
    type = "🔻 - FILTER"
    name = "quality"

    def __init__(self, cleaning: Cleaning, rules: Sequence[Rule], by: str | None) -> None:
        super().__init__()
        self.cleaning, self.rules, self.by = cleaning, rules, by

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        judge = Judge(self.rules, self.by)
        with RemovalLog(self.cleaning.notes, _reason) as log:
            for document in data:
                characters = len(document.text)
                if judge.keeps(document):
                    yield document
                else:
                    document.metadata["characters"] = characters
                    log.write(document, rank)
        atomic.write_json(self.cleaning.notes / f"{rank:05d}.tally", judge.tally.described())


def _reason(document: Any) -> dict[str, Any]:
    return {key: document.metadata[key] for key in ("reason", "characters")}


class _Publish(Listing):
    """The last stage: refuses too many removals, then moves the parts to their place and writes the report."""

    def __init__(self, cleaning: Cleaning, rules: Sequence[Rule], at_most: float | None) -> None:
        super().__init__(cleaning, _rows)
        self.rules, self.at_most = rules, at_most

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        self.tally = Tally.merged(map(json.loads, map(Path.read_bytes, sorted(self.cleaning.notes.glob("*.tally")))))
        refuse_too_many(self.tally, self.at_most)
        for path in sorted((self.cleaning.work / PARTS).glob("part_*")):
            os.replace(path, self.cleaning.out_dir / path.name)
        super().run(data, rank, world_size)

    def facts(self, notes: Path) -> dict[str, Any]:
        atomic.write_text(self.cleaning.out_dir / REPORT, report(self.tally, [rule.name for rule in self.rules]))
        return self.tally.figures([rule.name for rule in self.rules])


def _rows(notes: Path) -> Iterator[Row]:
    for note in read_notes(notes, "removed"):
        yield note["file"], note["record"], note["reason"], "", f"{note['characters']} characters"


def refuse_too_many(tally: Tally, at_most: float | None, *, sampled: bool = False) -> None:
    """Raise InputError where more documents would go than allowed; of a sample, where that is beyond chance."""
    total = max(1, tally.documents)
    share = tally.removed / total
    chance = 3 * math.sqrt(share * (1 - share) / total) if sampled else 0.0
    if at_most is not None and share - chance > at_most:
        worst = ", ".join(f"{name} {count / total:.1%}" for name, count in tally.reasons.most_common(3))
        raise InputError(
            f"--at-most {at_most:g}: the rules remove {tally.removed:,} of {'the first ' * sampled}{total:,} documents "
            f"({share:.1%}; {worst}). Nothing is written. Read them with --sample, then change the recipe or --at-most"
        )


def stages(cleaning: Cleaning, rules: Sequence[Rule], by: str | None, at_most: float | None) -> list[Stage]:
    """Return both stages in order."""
    writer = PartWriter(cleaning, folder=cleaning.work / PARTS)
    first = reading(cleaning, "1_documents", _Filters(cleaning, rules, by), writer)
    return [first, cleaning.stage("2_removals", [_Publish(cleaning, rules, at_most)], 1, [first], cost=0.0)]


def sample(cleaning: Cleaning, rules: Sequence[Rule], by: str | None, most: int) -> Tally:
    """Return what the rules do to the first documents of some files."""
    judge = Judge(rules, by)
    for document in first_documents(cleaning, most):
        judge.keeps(document)
    return judge.tally


def refuse_unknown_field(cleaning: Cleaning, by: str) -> None:
    """Refuse a field by which to count that none of the first documents has."""
    judge = Judge([], by)
    for document in first_documents(cleaning, CHECKED_FIRST):
        judge.keeps(document)
    if judge.tally.documents and judge.tally.sources.keys() == {ABSENT}:
        raise InputError(f"--by {by}: no such field in the first {judge.tally.documents:,} documents. Name another one")
