"""Records that cannot become documents: the reasons, and how many of them are allowed."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_blackmamba.formats.shards import Reject

INVALID_JSON = "invalid JSON"
INVALID_UTF8 = "invalid UTF-8"
LONE_SURROGATE = "lone surrogate"
MISSING_FIELD = "missing field"
NOT_A_STRING = "not a string"
EMPTY = "empty"
OUT_OF_RANGE = "value out of range"
TOO_DEEP = "nested too deeply"
TRUNCATED_LINE = "truncated last line"
TRUNCATED_FILE = "truncated compression"
DAMAGED_FILE = "damaged compression"
BLANK = "blank"  # a line or piece of white space: listed, never counted as bad, since nothing is lost with it

LISTED_AT_MOST = 10_000


class InputError(ValueError):
    """Input or settings the user has to put right; the message says how."""


def require_choice(flag: str, value: str | None, choices: Iterable[str]) -> None:
    """Refuse a value that is none of the choices, by the name of its option; None stands for the default."""
    *others, last = choices
    if value is not None and value not in (*others, last):
        raise InputError(f"{flag} {value}: choose {', '.join(others)} or {last}")


@dataclass(frozen=True)
class Tolerance:
    """The number of records of a shard that may be skipped, or their fraction."""

    count: int = 0
    fraction: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Tolerance":
        """Parse a limit: `100` records, or `0.001` or `0.1%` of them."""
        try:
            if text.isdecimal():
                return cls(count=int(text))
            fraction = float(text[:-1]) / 100 if text.endswith("%") else float(text)
            if 0 <= fraction < 1:
                return cls(fraction=fraction)
        except ValueError:
            pass
        raise InputError(f"--max-bad {text}: give a number of records (100) or a fraction of them (0.001, 0.1%)")


@dataclass
class RejectLog:
    """A log of skipped records of one shard; it stops the work when there are too many."""

    tolerance: Tolerance
    unit: str = "shard"
    """A word for what the tolerance counts in."""
    listed_in: str = "the manifest"
    """The place that lists skipped records."""
    counts: dict[str, int] = field(default_factory=dict)
    first: list[Reject] = field(default_factory=list)
    first_bad: Reject | None = None

    @property
    def bad(self) -> int:
        return sum(count for reason, count in self.counts.items() if reason != BLANK)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def add(self, source: str, path: str, record: int, reason: str, detail: str) -> None:
        """Note a record that is skipped; raise InputError where the tolerance is a number and now exceeded."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        found = Reject(source=source, record=record, reason=reason)
        if len(self.first) < LISTED_AT_MOST:
            self.first.append(found)
        if reason != BLANK:
            self.first_bad = self.first_bad or found
        if reason != BLANK and self.tolerance.fraction is None and self.bad > self.tolerance.count:
            raise InputError(self._too_many(path, record, reason, detail))

    def check(self, records: int) -> None:
        """Raise InputError where the tolerance is a fraction and the whole shard is worse."""
        allowed = self.tolerance.count if self.tolerance.fraction is None else self.tolerance.fraction * records
        if self.first_bad is None or self.bad <= allowed:
            return
        worst = ", ".join(f"{count} {reason}" for reason, count in self.counts.items() if reason != BLANK)
        raise InputError(
            f"{self.bad} of {records} records are bad ({worst}), more than --max-bad {self.tolerance.fraction:g} "
            f"allows; the first is {self.first_bad.source}, record {self.first_bad.record}"
        )

    def _too_many(self, path: str, record: int, reason: str, detail: str) -> str:
        message = f"{path}, record {record}: {reason}" + (f" ({detail})" if detail else "")
        if self.tolerance.count:
            return f"{message}; that makes {self.bad} in this {self.unit}, and --max-bad allows {self.tolerance.count}"
        skip = f"To skip such records and list them in {self.listed_in}: --max-bad 100, or --max-bad 0.1%"
        return f"{message}. {_option(reason, detail)}{skip}"


def _option(reason: str, detail: str) -> str:
    """Return the option that reads records which are not bad, but another kind of input than expected."""
    if reason == INVALID_UTF8 and "--encoding" not in detail:
        return "If the file has another encoding, name it: --encoding latin-1. "
    if reason == NOT_A_STRING or (reason == MISSING_FIELD and "it has" in detail):
        return "If the text is in another field, name it: --field NAME. "
    return ""
