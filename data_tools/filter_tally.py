"""Counts of quality filters by rule, reason and source, documents to read for each, and the report."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from difflib import unified_diff
from operator import itemgetter
from typing import Any

REPORT = "filters.md"
SHOWN = 20
"""Documents of each reason that the report shows, drawn at random."""
OTHERS = "(others)"
_MOST_SOURCES = 10_000
_LISTED_SOURCES = 50
_SHOWN_CHARACTERS, _SHOWN_LINES = 800, 12
_COMPARED_LINES = 500
"""From the first line that differs on: difflib takes quadratic time."""
_SOURCE_FIGURES = ("documents", "removed", "changed", "characters", "kept_characters")


class Draw:
    """Some documents, drawn at random by a hash of their names: neither order nor parts change the choice."""

    def __init__(self) -> None:
        self.drawn: list[tuple[int, dict[str, Any]]] = []
        self._last = 1 << 64

    def add(self, number: int, document: dict[str, Any]) -> None:
        self.drawn.append((number, document))
        if len(self.drawn) > 4 * SHOWN:
            self.drawn = self.best()
            self._last = self.drawn[-1][0]

    def wants(self, number: int) -> bool:
        """Return whether a document may be among those that are drawn."""
        return number < self._last

    def best(self) -> list[tuple[int, dict[str, Any]]]:
        return sorted(self.drawn, key=itemgetter(0))[:SHOWN]


class Tally:
    """The figures of some documents; parts count alone and are merged."""

    def __init__(self) -> None:
        self.reached: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.changed: Counter[str] = Counter()
        self.replaced: Counter[str] = Counter()
        self.sources: dict[str, Counter[str]] = {}
        self.removals: dict[str, Draw] = defaultdict(Draw)
        self.changes: dict[str, Draw] = defaultdict(Draw)

    @property
    def documents(self) -> int:
        return sum(counts["documents"] for counts in self.sources.values())

    @property
    def removed(self) -> int:
        return self.reasons.total()

    def count(self, source: str, characters: int, kept: int | None, changed: bool = False) -> None:
        """Count a document of a source; `kept` is what is left of it in characters, None if it is removed."""
        if source not in self.sources and len(self.sources) >= _MOST_SOURCES:
            source = OTHERS
        counts = self.sources.setdefault(source, Counter())
        counts.update(documents=1, characters=characters, removed=int(kept is None), changed=int(changed))
        counts["kept_characters"] += kept or 0

    def remove(self, rule: str, reason: str, where: dict[str, Any], text: str) -> None:
        name = f"{rule}: {reason}"
        self.reasons[name] += 1
        _draw(self.removals[name], where, lambda: _excerpt(text.splitlines(), len(text)))

    def change(self, rule: str, where: dict[str, Any], old: str, new: str, replaced: dict[str, int]) -> None:
        self.changed[rule] += 1
        self.replaced.update({f"{rule}: {kind}": count for kind, count in replaced.items()})
        _draw(self.changes[rule], where, lambda: _difference(old, new))

    def described(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        counts = {name: dict(getattr(self, name)) for name in ("reached", "reasons", "changed", "replaced")}
        drawn = {name: {key: draw.best() for key, draw in getattr(self, name).items()} for name in _DRAWN}
        return {**counts, **drawn, "sources": {name: dict(each) for name, each in self.sources.items()}}

    @classmethod
    def merged(cls, parts: Iterable[dict[str, Any]]) -> "Tally":
        total = cls()
        for part in parts:
            for name in ("reached", "reasons", "changed", "replaced"):
                getattr(total, name).update(part[name])
            for name, counts in part["sources"].items():
                total.sources.setdefault(name, Counter()).update(counts)
            for name in _DRAWN:
                for key, drawn in part[name].items():
                    for number, document in drawn:
                        getattr(total, name)[key].add(number, document)
        return total

    def figures(self, rules: Sequence[str]) -> dict[str, Any]:
        """Return the counts by rule and source, as the command prints them with --json."""
        listed = sorted(self.sources.items(), key=lambda each: -each[1]["documents"])
        sources = [{"source": name, **{key: counts[key] for key in _SOURCE_FIGURES}} for name, counts in listed]
        return {
            "rules": [row for rule in rules for row in self._rows(rule)],
            "changed": [
                {"rule": rule, "documents": self.changed[rule], "replaced": self._replaced(rule)}
                for rule in rules
                if self.changed[rule]
            ],
            "sources": sources,
        }

    def _rows(self, rule: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of a rule: all that it removes, then each of its reasons."""
        found = {name: count for name, count in self.reasons.most_common() if name.startswith(f"{rule}: ")}
        for name, count in ((rule, sum(found.values())), *found.items()):
            share, of_reached = count / max(1, self.documents), count / max(1, self.reached[rule])
            yield {"rule": name, "removed": count, "share": share, "share_of_those_reached": of_reached}

    def _replaced(self, rule: str) -> dict[str, int]:
        start = f"{rule}: "
        return {name.removeprefix(start): count for name, count in self.replaced.items() if name.startswith(start)}


_DRAWN = ("removals", "changes")


def _draw(draw: Draw, where: dict[str, Any], shown: Any) -> None:
    name = f"{where['file']}:{where['record']}".encode(errors="surrogateescape")
    number = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
    if draw.wants(number):
        draw.add(number, {**where, "shown": shown()})


def _excerpt(lines: Sequence[str], characters: int) -> str:
    text = "\n".join(lines[:_SHOWN_LINES])[:_SHOWN_CHARACTERS]
    more = len(lines) > _SHOWN_LINES or len(text) < characters - len(lines)
    return text + (f" [... {characters:,} characters]" if more else "")


def _difference(old: str, new: str) -> str:
    """Return the lines that differ, - before and + after."""
    before, after = old.splitlines(), new.splitlines()
    first = next((place for place, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    before, after = (text[first : first + _COMPARED_LINES] for text in (before, after))
    lines = list(unified_diff(before, after, n=0, lineterm=""))[2:]  # behind the names of two files
    marked = [line for line in lines if not line.startswith("@@")]
    return _excerpt(marked, sum(map(len, marked)))


def tables(figures: dict[str, Any]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield the columns and rows of the tables: by rule, of changes, and by source."""
    rules = [
        [("  " if ": " in row["rule"] else "") + row["rule"], f"{row['removed']:,}", f"{row['share']:.2%}",
         f"{row['share_of_those_reached']:.2%}"]
        for row in figures["rules"]
    ]  # fmt: skip
    yield ["rule", "removed", "of all", "of those it read"], rules
    if figures["changed"]:
        yield (
            ["changes the text", "documents", "replaced"],
            [[row["rule"], f"{row['documents']:,}", _counts(row["replaced"])] for row in figures["changed"]],
        )
    rows = [
        [row["source"], f"{row['documents']:,}", f"{row['removed'] / max(1, row['documents']):.2%}",
         f"{row['changed'] / max(1, row['documents']):.2%}", f"{row['characters']:,}", f"{row['kept_characters']:,}"]
        for row in figures["sources"][:_LISTED_SOURCES]
    ]  # fmt: skip
    yield ["source", "documents", "removed", "changed", "characters", "kept"], rows


def _counts(replaced: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in replaced.items())


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table for a terminal."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in (columns, *rows)
    ]


def report(tally: Tally, rules: Sequence[str]) -> str:
    """Return the report: the tables, then documents to read for each reason and each change."""
    figures = tally.figures(rules)
    kept = tally.documents - tally.removed
    parts = [f"# Quality filters\n\n{tally.documents:,} documents: {kept:,} kept, {tally.removed:,} removed.\n"]
    for columns, rows in tables(figures):
        lines = [columns, ["---"] * len(columns), *rows]
        parts.append("\n".join("| " + " | ".join(cell.strip() for cell in line) + " |" for line in lines) + "\n")
    if len(figures["sources"]) > _LISTED_SOURCES:
        parts.append(f"The {_LISTED_SOURCES} largest of {len(figures['sources']):,} sources.\n")
    for title, draws, counts in (("removed", tally.removals, tally.reasons), ("changed", tally.changes, tally.changed)):
        for name, count in counts.most_common():
            documents = [document for _, document in draws[name].best()]
            parts.append(f"## {name}: {len(documents)} of {count:,} documents {title}\n")
            parts += map(_shown, documents)
    return "\n".join(parts)


def _shown(document: dict[str, Any]) -> str:
    text = "\n".join(f"    {line}" for line in document["shown"].splitlines())
    return f"{document['file']}, record {document['record']}:\n\n{text}\n"
