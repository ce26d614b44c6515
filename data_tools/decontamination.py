"""Evaluation items in documents: their passages cut out, or the documents removed, and a report by task."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_blackmamba.data_tools.cleaning import Cleaning, Stage
from megatron_blackmamba.data_tools.evaluation_items import Evaluation, task_of
from megatron_blackmamba.data_tools.item_index import ItemIndex
from megatron_blackmamba.data_tools.other_fields import line
from megatron_blackmamba.data_tools.parts import ADDED, Listing, PartWriter, Row, read_notes, reading
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.words import normalize, spans
from megatron_blackmamba.formats import atomic

try:
    from datatrove.pipeline.base import PipelineStep
except ImportError:  # said by `require_datatrove`
    PipelineStep = object

SHORTEST = 200
"""Characters of text between cuts, and before and after them, that are worth keeping."""
REPORT = "contamination.md"
_MOST_SHOWN = 20
"""Passages of a task in the report."""
_AROUND = 80
"""Characters shown before and after a passage."""
_LONGEST_SHOWN = 400

Span = tuple[int, int]


@dataclass(frozen=True)
class TaskItems:
    """How many items a task or file has, and which of its fields they are from."""

    name: str
    items: int
    too_short: int
    """Items with too little distinctive text to look for; they stay in the documents."""
    fields: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def looked_for(self) -> int:
        return self.items - self.too_short

    def described(self) -> dict[str, Any]:
        counts = {"items": self.items, "looked_for": self.looked_for, "too_short": self.too_short}
        return {"name": self.name, **counts, "fields": list(self.fields), "left_out": list(self.left_out)}


def tasks_of(evaluations: Sequence[Evaluation], index: ItemIndex) -> list[TaskItems]:
    """Return what is looked for, by task. Refuse a task or file of which nothing is."""
    short = Counter(map(task_of, index.too_short))
    found: list[TaskItems] = []
    for each in evaluations:
        if each.items and short[each.name] == len(each.items):
            raise InputError(
                f"--against {each.name}: each of its {len(each.items)} items has too little distinctive text to look "
                f"for, in {', '.join(each.choice.taken)}. Choose other fields (--fields), or leave it out"
            )
        left_out = tuple(f"{name} ({why})" for name, why in each.choice.left_out.items())
        found.append(TaskItems(each.name, len(each.items), short[each.name], tuple(each.choice.taken), left_out))
    return found


def cut_out(text: str, passages: Iterable[Span], margin: int) -> tuple[str, list[Span]]:
    """Return the text without the passages and their margins, and what was cut; short remainders are cut too."""
    cuts: list[Span] = []
    for begin, end in sorted(passages):
        begin, end = _at_space(text, begin - margin, -1), _at_space(text, end + margin, 1)
        if begin - (cuts[-1][1] if cuts else 0) < SHORTEST:
            begin, end = (cuts[-1][0], max(cuts.pop()[1], end)) if cuts else (0, end)
        cuts.append((begin, len(text) if len(text) - end < SHORTEST else end))
        if cuts[-1][1] == len(text):
            break
    edges = [0, *(edge for cut in cuts for edge in cut), len(text)]
    kept = (text[begin:end].strip() for begin, end in zip(edges[::2], edges[1::2], strict=True))
    return "\n\n".join(piece for piece in kept if piece), cuts


def _at_space(text: str, place: int, step: int) -> int:
    """Return the next place between words, at most 40 characters away."""
    place = min(max(place, 0), len(text))
    for each in range(place, place + 40 * step, step):
        if each <= 0 or each >= len(text):
            return min(max(each, 0), len(text))
        if text[each - 1 if step < 0 else each].isspace():
            return each
    return place


class _Decontaminate(PipelineStep):
    """A step that cuts evaluation items out of documents, or drops the documents, and notes each passage."""

    type = "🔻 - FILTER"
    name = "evaluation items"

    def __init__(self, cleaning: Cleaning, index: ItemIndex, *, drop: bool, margin: int) -> None:
        super().__init__()
        self.notes, self.index, self.drop, self.margin = cleaning.notes, index, drop, margin

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        with atomic.atomic_file(self.notes / f"{rank:05d}.found") as notes:
            for document in data:
                words = self.index.split(normalize(document.text))
                passages = self.index.find(words)
                if not passages:
                    yield document
                    continue
                places = spans(document.text, words)
                length = len(document.text)
                where = [
                    (places[each.start][0], places[each.end - 1][1]) if places is not None else (0, length)
                    for each in passages
                ]
                kept, cuts = cut_out(document.text, where, self.margin)
                if self.drop or not kept:
                    kept, cuts = "", [(0, length)]
                for each, (begin, end) in zip(passages, where, strict=True):
                    cut = next(cut for cut in cuts if cut[0] <= begin < cut[1])
                    shown = _shown(document.text, begin, end)
                    found = {"item": each.item, "cut": cut, "removed": not kept, "shown": shown}
                    notes.write(line({**{key: document.metadata[key] for key in ("file", "record")}, **found}))
                if kept:
                    document.text = kept
                    document.metadata[ADDED] = {"cut": cuts}
                    yield document


def _shown(text: str, begin: int, end: int) -> str:
    """Return a passage in brackets with some text around it, on one line."""
    passage = text[begin:end]
    if len(passage) > _LONGEST_SHOWN:
        passage = f"{passage[: _LONGEST_SHOWN // 2]} [...] {passage[-_LONGEST_SHOWN // 2 :]}"
    before, after = text[max(0, begin - _AROUND) : begin], text[end : end + _AROUND]
    return " ".join(f"{before}⟦{passage}⟧{after}".split())


class _Report(Listing):
    """The last stage; it also writes the report by task."""

    def __init__(self, cleaning: Cleaning, tasks: Sequence[TaskItems]) -> None:
        super().__init__(cleaning, _removed, cut=_cut)
        self.tasks = tasks

    def facts(self, notes: Path) -> dict[str, Any]:
        """Write the report, and return its figures."""
        by_task: dict[str, list[dict[str, Any]]] = defaultdict(list)
        documents: dict[str, set[tuple[str, int]]] = defaultdict(set)
        items: dict[str, set[str]] = defaultdict(set)
        passages: Counter[str] = Counter()
        for note in read_notes(notes, "found"):
            task = task_of(note["item"])
            documents[task].add((note["file"], note["record"]))
            items[task].add(note["item"])
            passages[task] += 1
            if len(by_task[task]) < _MOST_SHOWN:
                by_task[task].append(note)
        found = [
            {
                **task.described(),
                "items_found": len(items[task.name]),
                "passages": passages[task.name],
                "documents": len(documents[task.name]),
            }
            for task in self.tasks
        ]
        atomic.write_text(self.cleaning.out_dir / REPORT, "\n".join(_report(found, by_task)) + "\n")
        return {"cut": sum(1 for _ in _cut(notes)), "tasks": found}


def announced(tasks: Sequence[TaskItems]) -> Iterator[str]:
    """Yield what is looked for, and from which fields."""
    yield f"looking for {sum(task.looked_for for task in tasks):,} evaluation items"
    lines = table([task.described() for task in tasks])
    ends = ["fields", *("; ".join(task.fields) + _without(task.left_out) for task in tasks)]
    yield from (f"{line}  {end}" for line, end in zip(lines, ends, strict=True))


def _without(left_out: Sequence[str]) -> str:
    return f"; not used: {', '.join(left_out)}" if left_out else ""


def summary(corpus: str, counts: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a corpus, as a row of `table`."""
    found = {key: sum(task[key] for task in counts["tasks"]) for key in ("items_found", "passages")}
    return {"corpus": corpus, **{key: counts[key] for key in ("kept", "removed", "cut")}, **found}


def table(tasks: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of tasks or corpora with these figures, aligned for a terminal."""
    columns = [key for key in tasks[0] if key not in ("fields", "left_out")]
    rows = [[key.replace("_", " ") for key in columns], *([_figure(task[key]) for key in columns] for task in tasks)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]


def _figure(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _report(found: Sequence[dict[str, Any]], passages: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    columns = [key for key in found[0] if key not in ("fields", "left_out")]
    yield "# Evaluation items in the documents\n"
    yield "| " + " | ".join(key.replace("_", " ") for key in columns) + " |"
    yield "|" + "---|" * len(columns)
    for task in found:
        yield "| " + " | ".join(_figure(task[key]) for key in columns) + " |"
    yield "\n`too short`: items with too little distinctive text to look for; documents may still hold them."
    for task in found:
        shown = passages.get(task["name"], [])
        if shown:
            yield f"\n## {task['name']}: {len(shown)} of {task['passages']:,} passages\n"
        for note in shown:
            yield f"- {note['file']}, record {note['record']}, {_action(note)} ({note['item']}): {note['shown']}"


def _action(note: dict[str, Any]) -> str:
    begin, end = note["cut"]
    return "removed" if note["removed"] else f"cut {begin:,} to {end:,}"


def stages(cleaning: Cleaning, index: ItemIndex, tasks: Sequence[TaskItems], *, drop: bool, margin: int) -> list[Stage]:
    """Return both stages in order."""
    cut = _Decontaminate(cleaning, index, drop=drop, margin=margin)
    first = reading(cleaning, "1_documents", cut, PartWriter(cleaning))
    return [first, cleaning.stage("2_removals", [_Report(cleaning, tasks)], 1, [first], cost=0.0)]


def _removed(notes: Path) -> Iterator[Row]:
    last = None
    for note in read_notes(notes, "found"):
        where = (note["file"], note["record"])
        if note["removed"] and where != last:  # a document is one row
            yield _row(note, "evaluation item")
        last = where


def _cut(notes: Path) -> Iterator[Row]:
    for note in read_notes(notes, "found"):
        if not note["removed"]:
            yield _row(note, "evaluation item, cut")


def _row(note: dict[str, Any], reason: str) -> Row:
    begin, end = note["cut"]
    return note["file"], note["record"], reason, note["item"], f"characters {begin}-{end}: {note['shown']}"
