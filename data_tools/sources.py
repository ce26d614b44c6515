"""Find the raw files and their formats, and group them into shards."""

import fnmatch
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from megatron_blackmamba.data_tools.compression import SUFFIXES as COMPRESSION_SUFFIXES
from megatron_blackmamba.data_tools.origins import refuse_incomplete
from megatron_blackmamba.data_tools.readers import TABLES, Format
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.streams import STDIN
from megatron_blackmamba.formats.remote import files_below, is_folder, is_remote, size_of
from megatron_blackmamba.formats.tree import files_under

_FORMAT_OF_SUFFIX: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".jsonlines": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}

NOT_TAKEN_LISTED = 100
SPLITS = ("train", "validation", "test")

_SPLIT_OF_WORD = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_WORD = re.compile(r"(?:^|[-_.])(" + "|".join(_SPLIT_OF_WORD) + r")(?=$|[-_.])", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """One raw file, as it was when the work was planned."""

    path: str
    name: str
    format: Format
    bytes: int
    modified_ns: int


@dataclass(frozen=True)
class NotTaken:
    """Files in the input folders that were not read: their number, and the first ones for manifests."""

    count: int = 0
    first: tuple[str, ...] = ()

    @classmethod
    def of(cls, paths: Sequence[Path | str]) -> "NotTaken":
        return cls(len(paths), tuple(printable(path) for path in paths[:NOT_TAKEN_LISTED]))


def printable(path: str | Path) -> str:
    """Return a path as text; a name need not be UTF-8."""
    return str(path).encode(errors="surrogateescape").decode(errors="backslashreplace")


@dataclass(frozen=True)
class Preset:
    """The storage layout of a published corpus."""

    format: Format
    field: str
    match: str


PRESETS = {
    "pile": Preset("jsonl", "text", "*.jsonl.zst"),
    "slimpajama": Preset("jsonl", "text", "*.jsonl.zst"),
    "starcoder": Preset("parquet", "content", "*.parquet"),
    "pes2o": Preset("jsonl", "text", "*.json*.gz|*.json*.zst"),  # v1 and v2: gzip, v3: zstd
    "proofpile": Preset("jsonl", "text", "*.jsonl.gz|*.jsonl.zst"),  # ProofPile and Proof-Pile-2
    "pg19": Preset("text", "text", "*.txt"),
    "fineweb": Preset("parquet", "text", "*.parquet"),
    "dclm": Preset("jsonl", "text", "*.jsonl.zst"),
    "commonpile": Preset("jsonl", "text", "*.json*.gz|*.json*.zst"),
    "nemotron-cc": Preset("parquet", "text", "*.parquet"),
    "finemath": Preset("parquet", "text", "*.parquet"),
}


@dataclass(frozen=True)
class Selection:
    """The rule that selects files in input folders; files given by name are always read."""

    match: str | None = None
    """Patterns separated by |; without one, what has the suffix of a known format."""
    exclude: tuple[str, ...] = ()
    split: str | None = None
    """Take this split only. A file whose path names none counts as train."""

    def takes(self, inside: str, folder: str) -> bool:
        """Return whether a file in a folder of this name passes `match`, `exclude` and `split`."""
        if self.match and not any(_fits(inside, pattern) for pattern in self.match.split("|")):
            return False
        if any(_fits(inside, pattern) for patterns in self.exclude for pattern in patterns.split("|")):
            return False
        return self.split is None or (split_of(inside) or split_of(folder) or "train") == self.split


@dataclass(frozen=True)
class Preferences:
    """Patterns of raw files, of which earlier ones are preferred."""

    patterns: tuple[str, ...] = ()

    def rank(self, name: str) -> int:
        """Return the rank of a file by its name: the higher is preferred, and 0 matches no pattern."""
        for place, pattern in enumerate(self.patterns):
            if _fits(name, pattern):
                return len(self.patterns) - place
        return 0


@dataclass(frozen=True)
class Found:
    sources: list[Source]
    ignored: list[Path | str]
    """Files in the given folders that are not taken for text; those in object storage by URL."""


class Listed(NamedTuple):
    """The files of one input: all visible ones of a folder, or the file itself."""

    folder: str
    """Absolute path or URL."""
    files: dict[str, str]
    """The path or URL of each file, and its path in the folder."""
    alone: bool = False
    """The input is a file, which is taken whatever its name."""
    facts: dict[str, tuple[int, int]] = {}  # noqa: RUF012
    """Bytes and time of change of objects."""


def find_sources(
    inputs: Sequence[str],
    format: Format | None = None,
    match: str | None = None,
    apart: str | Path | None = None,
    *,
    exclude: Sequence[str] = (),
    split: str | None = None,
) -> Found:
    """Return the given files, and all files under the given folders, in natural order.

    Args:
        match: Patterns of files to read in folders, separated by |.
        exclude: Patterns of files to skip in folders.
        split: train, validation or test, recognised by the path.
        apart: Output folder, which is skipped if it is inside an input folder.
    """
    selection = Selection(match, tuple(exclude), split)
    if not inputs:
        raise InputError("no input: name files or folders, or - for standard input")
    if STDIN in inputs:
        return Found([_standard_input(inputs, format)], [])
    remote = [given for given in inputs if is_remote(given)]
    local = [given for given in inputs if given not in remote]
    taken: list[Source] = []
    ignored: list[Path | str] = []
    for some in (remote, local):
        listings = [_objects(given) if some is remote else _local_files(given, apart) for given in some]
        whole_url = some is remote and local  # a name alone could be that of a local file too
        root = "" if whole_url else _common([listed.folder for listed in listings])
        for given, listed in zip(some, listings, strict=True):
            wanted = [path for path in listed.files if listed.alone or _wanted(path, listed, format, selection)]
            if not wanted:
                raise InputError(
                    f"{given}: no input in this folder among its {len(listed.files)} files"
                    + _advice(listed, format, selection)
                )
            for folder in () if listed.alone else {path.rpartition("/")[0]: None for path in wanted}:
                refuse_incomplete(folder or "/")
            taken += [_source(path, root, format, listed) for path in sorted(wanted, key=_natural)]
            left = sorted(listed.files.keys() - set(wanted), key=_natural)
            ignored += left if some is remote else map(Path, left)
    _refuse_twins(source.path for source in taken if not is_remote(source.path))
    return Found(taken, ignored)


def _standard_input(inputs: Sequence[str], format: Format | None) -> Source:
    if len(inputs) > 1:
        raise InputError("standard input (-) cannot be combined with files. Pipe the files too, or leave out the -")
    if sys.stdin is None or sys.stdin.isatty():
        state = "closed" if sys.stdin is None else "this terminal"
        raise InputError(f"standard input (-) is {state}: pipe the records in, or name a file")
    if format in TABLES:
        raise InputError(f"{format} cannot be read from standard input: it is not read in order. Name the file")
    return Source(STDIN, "stdin", format or "jsonl", 0, 0)


def _local_files(given: str, apart: str | Path | None) -> Listed:
    """List a local input, except hidden files and files in the output folder."""
    path = Path(given)
    if not path.is_dir():
        if not path.exists():
            raise InputError(f"{path}: no such file or folder (working folder: {Path.cwd()})")
        return Listed(str(path.parent.absolute()), {str(path): path.name}, alone=True)
    shards, folder = None if apart is None else Path(apart).resolve(), path.resolve()
    if shards == folder:
        raise InputError(f"{path}: is an input and the folder for the shards: choose another for these")
    inside = shards if shards is not None and shards.is_relative_to(folder) else None
    files = [file for file in files_under(path) if not (inside and file.parent.resolve().is_relative_to(inside))]
    return Listed(str(path.absolute()), _visible((str(file), file.relative_to(path).as_posix()) for file in files))


def _objects(url: str) -> Listed:
    """List an input in object storage."""
    url = url.rstrip("/")
    folder, _, name = url.rpartition("/")
    if not is_folder(url):
        return Listed(folder, {url: name}, alone=True, facts={url: (size_of(url), 0)})
    facts = {}
    for file, info in files_below(url).items():
        modified = info.get("LastModified")
        facts[file] = int(info["size"]), int(modified.timestamp() * 1e9) if isinstance(modified, datetime) else 0
    return Listed(url, _visible((file, file.removeprefix(url + "/")) for file in facts), facts=facts)


def _visible(files: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {path: inside for path, inside in files if not any(part.startswith(".") for part in inside.split("/"))}


def _common(folders: Sequence[str]) -> str:
    """Return the folder that holds all folders, with a slash at its end; empty if their stores differ."""
    levels = zip(*(folder.rstrip("/").split("/") for folder in folders), strict=False)
    return "".join(f"{level[0]}/" for level in takewhile(lambda level: len(set(level)) == 1, levels))


def plan_shards(sources: Sequence[Source], shard_bytes: int) -> list[list[Source]]:
    """Group neighbouring files into shards of up to `shard_bytes` of input; a larger file gets its own shard."""
    shards: list[list[Source]] = []
    room = 0
    for source in sources:
        if not shards or source.bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(source)
        room -= source.bytes
    return shards


def parse_size(text: str) -> int:
    """Parse a size such as `4GB`, `512MiB` or `1000`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    size = int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " ")) if found else 0
    if size < 1:
        raise InputError(f"{text}: not a size; write 4GB, 512MB or 1000000")
    return size


def parse_array(text: str) -> tuple[int, int]:
    """Parse `INDEX/COUNT`, counted from 0."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or int(found[2]) < 1:
        raise InputError(f"--array {text}: write INDEX/COUNT, as 0/8 or $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT")
    index, count = int(found[1]), int(found[2])
    if index >= count:
        raise InputError(
            f"--array {text}: the index counts from 0, so it ends at {count - 1}: sbatch --array=0-{count - 1}"
        )
    return index, count


def _source(path: str, root: str, format: Format | None, listed: Listed) -> Source:
    found = format or format_of(path)
    if found is None and ".warc" in path.lower():
        raise InputError(
            f"{path}: WARC files hold web pages, not text: extract the text first, for example with datatrove's "
            "WarcReader and Trafilatura, and tokenize the JSON lines that it writes"
        )
    if found is None:
        raise InputError(
            f"{path}: cannot tell its format by its name: add --format text if it is one document, "
            "else jsonl, parquet or arrow"
        )
    size, modified_ns = listed.facts.get(path) or _facts(path)
    whole = path if path in listed.facts else str(Path(path).absolute())
    return Source(path, printable(whole[len(root) :]), found, size, modified_ns)


def _facts(path: str) -> tuple[int, int]:
    if not os.path.exists(path):
        raise InputError(f"{path}: a link to nothing ({os.readlink(path)}): fetch the file, or remove it")
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path}: not a regular file. Read a pipe as standard input: -")
    return status.st_size, status.st_mtime_ns


def format_of(path: str | Path) -> Format | None:
    """Return the format by the suffix, ignoring the suffix of a compression."""
    name = Path(path).name.lower()
    for suffix in COMPRESSION_SUFFIXES:
        name = name.removesuffix(suffix)
    return _FORMAT_OF_SUFFIX.get(Path(name).suffix)


def _wanted(path: str, listed: Listed, format: Format | None, selection: Selection) -> bool:
    if not selection.takes(listed.files[path], Path(listed.folder).name) or _describes_a_dataset(path, listed):
        return False
    return bool(selection.match) or (format_of(path) is not None if format is None else format_of(path) == format)


def _describes_a_dataset(path: str, listed: Listed) -> bool:
    """Return whether a JSON file is metadata of `datasets.Dataset.save_to_disk`, which has no documents."""
    folder, _, name = path.rpartition("/")
    if name in ("dataset_info.json", "state.json"):
        return any(other.rpartition("/")[0] == folder and other.endswith(".arrow") for other in listed.files)
    return name == "dataset_dict.json"


def _advice(listed: Listed, format: Format | None, selection: Selection) -> str:
    above = split_of(Path(listed.folder).name) or "train"
    named = {split_of(inside) or above for inside in listed.files.values()}
    if selection.split and selection.split not in named and listed.files:
        return f" that belongs to the {selection.split} split by its path: add --split {min(named)}"
    if selection.match:
        return f" that matches {selection.match}" + (" and is not excluded" if selection.exclude else "")
    suffix = f" that is {format} by its suffix" if format else ""
    return suffix + _choice([*map(Path, listed.files)], format)


def _choice(files: Sequence[Path], format: Format | None) -> str:
    """Return the options that read the files with the most frequent suffix."""
    suffixes = Counter(path.suffix for path in files if path.suffix)
    if not suffixes:
        return ". Name the files one by one, with --format text if each is one document" if files else ""
    (suffix, _), *others = suffixes.most_common()
    also = f" (also there: {', '.join(other for other, _ in others[:5])})" if others else ""
    if format not in (None, "text"):
        return f". Add --match '*{suffix}' to read these files as {format}{also}"
    return f". Add --match '*{suffix}' --format text to read each of these files as one document{also}"


def _natural(path: str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts part-2 before part-10."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", path) if part]


def _refuse_twins(paths: Iterable[str]) -> None:
    seen: set[Path] = set()
    for path in paths:
        real = Path(path).resolve()
        if real in seen:
            raise InputError(f"{path}: named twice; its documents would be in the shards twice")
        seen.add(real)


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
