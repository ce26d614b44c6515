"""Select the files of a folder: by patterns for names and paths, and by the split in a path."""

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path

SPLITS = ("train", "validation", "test")

_SPLIT_OF_WORD = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_WORD = re.compile(r"(?:^|[-_.])(" + "|".join(_SPLIT_OF_WORD) + r")(?=$|[-_.])", re.IGNORECASE)


@dataclass(frozen=True)
class Selection:
    """The rule that selects files in input folders; files given by name are always read."""

    match: str | None = None
    """Patterns separated by |; without one, what has the suffix of a known format."""
    exclude: tuple[str, ...] = ()
    split: str | None = None
    """Take this split only. A file whose path names none counts as train."""

    def takes(self, path: Path, folder: Path) -> bool:
        """Return whether a file under `folder` passes `match`, `exclude` and `split`."""
        inside = path.relative_to(folder).as_posix()
        if self.match and not any(_fits(inside, pattern) for pattern in self.match.split("|")):
            return False
        if any(_fits(inside, pattern) for patterns in self.exclude for pattern in patterns.split("|")):
            return False
        return self.split is None or (split_of(inside) or split_of(folder.name) or "train") == self.split


def split_of(path: str) -> str | None:
    """Return the split that a path names (train/a.jsonl, val-00.json.gz, proofpile_dev.jsonl); the last one counts."""
    *folders, name = path.split("/")
    found = _WORD.search(name)
    if found:
        return _SPLIT_OF_WORD[found[1].lower()]
    return next((_SPLIT_OF_WORD[f.lower()] for f in reversed(folders) if f.lower() in _SPLIT_OF_WORD), None)


def _fits(inside: str, pattern: str) -> bool:
    """Return whether a pattern matches: with a slash it matches the path (from any folder on), otherwise the name."""
    if "/" not in pattern:
        return fnmatch.fnmatch(inside.rpartition("/")[2], pattern)
    pattern = pattern.removeprefix("./").lstrip("/")
    return fnmatch.fnmatch(inside, pattern) or fnmatch.fnmatch(inside, f"*/{pattern}")
