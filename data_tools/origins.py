"""The manifest of a cleaned corpus: its parts, and the raw files whose documents each part holds.

`dedup` and `decontaminate` write it last. `tokenize` reads it, so that shards name the raw files behind cleaned parts.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.streams import STDIN
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.remote import files_below, is_remote, open_any
from megatron_blackmamba.formats.shards import RawFile

CLEANING = "cleaning.manifest"  # not .json, which would be read as documents
WORK = ".work"
SETTINGS = "settings.json"
DONE = "done.json"
REMOVED = "removed.tsv"
COLUMNS = ("file", "record", "reason", "resembles", "detail")


class Part(BaseModel):
    """One cleaned file, and the files whose documents it holds; these include parts of an earlier cleaning."""

    model_config = ConfigDict(extra="forbid")

    name: str
    sha256: str
    bytes: int
    documents: int
    origins: list[RawFile]
    cut: int | None = None
    """Documents of which passages were cut; each names them in its field `cut`."""


class CleaningManifest(BaseModel):
    """The manifest of a cleaned corpus."""

    model_config = ConfigDict(extra="forbid")

    format_version: int = 1
    parts: list[Part]

    @classmethod
    def read(cls, folder: str | Path) -> "CleaningManifest | None":
        """Read the manifest of a folder, or return None if no cleaning wrote the folder."""
        place = os.path.join(folder, CLEANING)
        if not (files_below(place) if is_remote(place) else os.path.exists(place)):
            return None
        try:
            with open_any(place) as file:
                return cls.model_validate_json(file.read())
        except ValidationError as error:
            first = error.errors()[0]["msg"]
            raise InputError(f"{place}: not the manifest of a cleaning: {first}. Restore it") from None

    def write(self, folder: Path) -> None:
        atomic.write_text(folder / CLEANING, self.model_dump_json(indent=2, exclude_none=True) + "\n")


class Cleanings:
    """The cleaning manifests beside raw files, each read once."""

    def __init__(self) -> None:
        self._known: dict[str, CleaningManifest | None] = {}

    def origins_of(self, path: str, sha256: str, unpacked_sha256: str) -> list[RawFile]:
        """Return the raw files behind a file, which has been read.

        These are the files that a cleaning read, or the decompressed content of a compressed file.
        """
        unpacked = (
            [RawFile(name=f"{os.path.basename(path)}, unpacked", sha256=unpacked_sha256)] if unpacked_sha256 else []
        )
        return self._cleaned_from(path, sha256) or unpacked

    def _cleaned_from(self, path: str, sha256: str) -> list[RawFile]:
        if path == STDIN:
            return []
        for part in self._parts_beside(path):
            if part.sha256 == sha256:
                return part.origins
            if part.name == os.path.basename(path):
                raise InputError(f"{path}: is not what {CLEANING} beside it describes. Restore it, or clean again")
        return []

    def is_part(self, path: str) -> bool:
        """Return whether a file is a part of an earlier cleaning, by its name."""
        return any(part.name == os.path.basename(path) for part in self._parts_beside(path))

    def _parts_beside(self, path: str) -> list[Part]:
        folder = os.path.dirname(path) or "."
        if folder not in self._known:
            self._known[folder] = CleaningManifest.read(folder)
        manifest = self._known[folder]
        return manifest.parts if manifest else []


def refuse_incomplete(folder: str | Path) -> None:
    """Refuse a folder of cleaned parts in which one is missing or cut, or whose cleaning has not finished."""
    for work in () if is_remote(folder) else sorted(Path(folder, WORK).glob("*/")):
        if (work / SETTINGS).exists() and not (work / DONE).exists():
            raise InputError(
                f"{folder}: `blackmamba data {work.name}` has not finished here. Run the same command again"
            )
    manifest = CleaningManifest.read(folder)
    sizes = _sizes(folder) if manifest else {}
    for part in manifest.parts if manifest else ():
        size = sizes.get(part.name)
        if size != part.bytes:
            path, wrong = os.path.join(folder, part.name), f"has {size} bytes, not {part.bytes}"
            wrong = "is missing" if size is None else wrong
            raise InputError(
                f"{path}: {wrong}, though the cleaning finished. Restore it, or clean again into another folder"
            )


def part_of(
    name: str,
    sha256: str,
    size: int,
    documents: int,
    read: Iterable[tuple[RawFile, list[RawFile]]],
    cut: int | None = None,
) -> Part:
    """Return the entry of a part that holds documents of the files `read`, each with its own origins."""
    origins = {raw.sha256: raw for file, earlier in read for raw in (file, *earlier)}
    return Part(name=name, sha256=sha256, bytes=size, documents=documents, origins=list(origins.values()), cut=cut)


def _sizes(folder: str | Path) -> dict[str, int]:
    """Return the size of each file in a folder, by name."""
    if is_remote(folder):
        return {url.removeprefix(f"{folder}/"): int(info["size"]) for url, info in files_below(str(folder)).items()}
    return {entry.name: entry.stat().st_size for entry in os.scandir(folder) if entry.is_file()}
