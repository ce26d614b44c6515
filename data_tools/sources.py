"""Find the raw files and their formats, and group them into shards."""

import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from megatron_blackmamba.data_tools.compression import SUFFIXES as COMPRESSION_SUFFIXES
from megatron_blackmamba.data_tools.object_storage import remote_files
from megatron_blackmamba.data_tools.origins import refuse_incomplete
from megatron_blackmamba.data_tools.readers import TABLES, Format
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.selection import Selection, split_of
from megatron_blackmamba.data_tools.streams import STDIN
from megatron_blackmamba.formats.remote import is_remote
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
}


@dataclass(frozen=True)
class Found:
    sources: list[Source]
    ignored: list[Path | str]
    """Files in the given folders that are not taken for text; those in object storage by URL."""


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
        if len(inputs) > 1:
            raise InputError("standard input (-) cannot be combined with files. Pipe the files too, or leave out the -")
        if sys.stdin is None:
            raise InputError("standard input (-) is closed: pipe the records in, or name a file")
        if sys.stdin.isatty():
            raise InputError("standard input (-) is this terminal: pipe the records in, or name a file")
        return Found([Source(STDIN, "stdin", _format_of_stdin(format), 0, 0)], [])
    remote = [given for given in inputs if is_remote(given)]
    taken, ignored = _remote(remote, selection, format, alone=len(remote) == len(inputs))
    local = [given for given in inputs if given not in remote]
    if not local:
        return Found(taken, ignored)
    paths: list[Path] = []
    for given in local:
        path = Path(given)
        if path.is_dir():
            inside = sorted(_visible(path, apart), key=_natural)
            wanted = [p for p in inside if _wanted(p, path, format, selection)]
            dangling = next((p for p in wanted if not p.exists()), None)
            if dangling:
                raise InputError(
                    f"{dangling}: a link to nothing ({os.readlink(dangling)}): fetch the file, or remove it"
                )
            if not wanted:
                raise InputError(
                    f"{path}: no input in this folder among its {len(inside)} files"
                    + _advice(path, inside, format, selection)
                )
            for folder in {path.parent: None for path in wanted}:
                refuse_incomplete(folder)
            paths += wanted
            ignored += sorted(set(inside) - set(wanted), key=_natural)
        elif path.exists():
            paths.append(path)
        else:
            raise InputError(f"{path}: no such file or folder (working folder: {Path.cwd()})")
    _refuse_twins(paths)
    folders = [path if path.is_dir() else path.parent for path in map(Path, local)]
    root = Path(os.path.commonpath([folder.absolute() for folder in folders]))
    return Found(taken + [_source(path, root, format) for path in paths], ignored)


def _remote(
    urls: Sequence[str], selection: Selection, format: Format | None, *, alone: bool
) -> tuple[list[Source], list[Path | str]]:
    """Return the objects taken from object storage, in natural order, and those that are not.

    alone: There are no local inputs, whose names could be the same.
    """
    folders: list[str] = []
    taken: list[Source] = []
    ignored: list[Path | str] = []
    for url in urls:
        found, other = remote_files(url, selection)
        single = [each.url for each in found] == [url.rstrip("/")]
        folders.append(url.rstrip("/").rpartition("/")[0] if single else url.rstrip("/"))
        wanted = [each for each in found if format or len(found) == 1 or format_of(Path(each.url))]
        for each in sorted(wanted, key=lambda each: _natural(Path(each.name))):
            known = format or format_of(Path(each.url))
            if known is None:
                raise InputError(
                    f"{each.url}: cannot tell its format by its name: add --format text if it is one document, "
                    "else jsonl or parquet"
                )
            taken.append(Source(each.url, printable(each.name), known, each.bytes, each.modified_ns))
        if not wanted:
            raise InputError(
                f"{url}: no input among its {len(found) + len(other)} objects{_choice([*map(Path, other)], format)}"
            )
        if not single:
            for folder in {each.url.rpartition("/")[0]: None for each in wanted}:
                refuse_incomplete(folder)
        ignored += sorted({*other, *(each.url for each in found)} - {each.url for each in wanted})
    root = _common(folders) if alone else ""
    return [replace(source, name=printable(source.path[len(root) :])) for source in taken], ignored


def _common(folders: Sequence[str]) -> str:
    """Return the folder that holds all folders, with a slash at its end; empty if their stores differ."""
    levels = zip(*(folder.split("/") for folder in folders), strict=False)
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


def _visible(folder: Path, apart: str | Path | None) -> list[Path]:
    """Return the files of an input folder, except hidden files and files in the output folder."""
    files = [path for path in files_under(folder) if not _hidden(path, folder)]
    shards = None if apart is None else Path(apart).resolve()
    if shards == folder.resolve():
        raise InputError(f"{folder}: is an input and the folder for the shards: choose another for these")
    if shards is None or not shards.is_relative_to(folder.resolve()):
        return files
    return [path for path in files if not path.parent.resolve().is_relative_to(shards)]


def _source(path: Path, root: Path, format: Format | None) -> Source:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path}: not a regular file. Read a pipe as standard input: -")
    found = format or format_of(path)
    if found is None and ".warc" in path.name.lower():
        raise InputError(
            f"{path}: WARC files hold web pages, not text: extract the text first, for example with datatrove's "
            "WarcReader and Trafilatura, and tokenize the JSON lines that it writes"
        )
    if found is None:
        raise InputError(
            f"{path}: cannot tell its format by its name: add --format text if it is one document, "
            "else jsonl, parquet or arrow"
        )
    name = path.absolute().relative_to(root).as_posix()
    return Source(str(path), printable(name), found, status.st_size, status.st_mtime_ns)


def format_of(path: Path) -> Format | None:
    """Return the format by the suffix, ignoring the suffix of a compression."""
    name = path.name.lower()
    for suffix in COMPRESSION_SUFFIXES:
        name = name.removesuffix(suffix)
    return _FORMAT_OF_SUFFIX.get(Path(name).suffix)


def _format_of_stdin(format: Format | None) -> Format:
    if format in TABLES:
        raise InputError(f"{format} cannot be read from standard input: it is not read in order. Name the file")
    return format or "jsonl"


def _wanted(path: Path, folder: Path, format: Format | None, selection: Selection) -> bool:
    if not selection.takes(path, folder) or _describes_a_dataset(path):
        return False
    return bool(selection.match) or (format_of(path) is not None if format is None else format_of(path) == format)


def _describes_a_dataset(path: Path) -> bool:
    """Return whether a JSON file is metadata of `datasets.Dataset.save_to_disk`, which has no documents."""
    if path.name == "dataset_dict.json":
        return True
    return path.name in ("dataset_info.json", "state.json") and any(path.parent.glob("*.arrow"))


def _advice(folder: Path, inside: Sequence[Path], format: Format | None, selection: Selection) -> str:
    named = {split_of(path.relative_to(folder).as_posix()) or split_of(folder.name) or "train" for path in inside}
    if selection.split and selection.split not in named and inside:
        return f" that belongs to the {selection.split} split by its path: add --split {min(named)}"
    if selection.match:
        return f" that matches {selection.match}" + (" and is not excluded" if selection.exclude else "")
    suffix = f" that is {format} by its suffix" if format else ""
    return suffix + _choice(inside, format)


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


def _hidden(path: Path, top: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(top).parts)


def _natural(path: Path | str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts part-2 before part-10."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", str(path)) if part]


def _refuse_twins(paths: Iterable[Path]) -> None:
    seen: set[Path] = set()
    for path in paths:
        real = path.resolve()
        if real in seen:
            raise InputError(f"{path}: named twice; its documents would be in the shards twice")
        seen.add(real)
