"""The manifest of a checkpoint: written last, with the size and sha256 of every file that anything reads."""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_blackmamba.formats import atomic, run_folder

NAME = run_folder.MANIFEST
VERSION = 1
CHUNK = 1 << 22
TABLE = ".metadata"
REQUIRED = ("common.pt", "metadata.json", TABLE, "state.json", "config.yaml")
"""Every checkpoint has these, beside its shards."""
SMALL = (*REQUIRED, "tokenizer.json")
SHARD = ".distcp"
STEP = re.compile(r"step_([0-9]+)")
SHA256 = re.compile(r"[0-9a-f]{64}")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as it is. The message names it, the file and what is wrong."""


class DamagedCheckpoint(CheckpointError):
    """The files differ from what was written. I/O errors and unknown formats raise `CheckpointError` instead."""


def describe(path: Path, moved: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Return a file's entry in the manifest; `moved` is called after each chunk."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            moved()
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def write(folder: Path, step: int, files: dict[str, dict[str, Any]], facts: dict[str, Any]) -> None:
    """Declare the checkpoint complete."""
    content = {"format": VERSION, "step": step, **facts, "files": dict(sorted(files.items()))}
    atomic.write_json(folder / NAME, content)


def read(folder: Path) -> dict[str, Any]:
    """Return the manifest. Raise DamagedCheckpoint if it is not this folder's, or leaves out one of its files."""
    path = folder / NAME
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{folder}: no {NAME}: the save was never completed") from None
    except IsADirectoryError:
        raise DamagedCheckpoint(f"{path}: not a file") from None
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: not a manifest: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("files"), dict) or "step" not in content:
        raise DamagedCheckpoint(f"{path}: not a checkpoint's manifest")
    if content.get("format") != VERSION:
        raise CheckpointError(
            f"{path}: format {content.get('format')!r}; this version of megatron_blackmamba reads format {VERSION}"
        )
    _check_step(folder, content["step"])
    for name, entry in content["files"].items():
        if not _is_entry(name, entry):
            raise DamagedCheckpoint(f"{path}: its entry {name!r} does not describe a file")
    unlisted = sorted(_files_read(folder) - content["files"].keys())
    if unlisted:
        raise DamagedCheckpoint(f"{path}: it has no entry for {', '.join(unlisted[:3])}")
    return content


def step_in_name(folder: Path) -> int | None:
    """Return N of a folder named step_N."""
    name = STEP.fullmatch(os.path.basename(os.path.abspath(folder)))
    return int(name[1]) if name else None


def _check_step(folder: Path, step: Any) -> None:
    """Refuse a checkpoint under another step's name. Any name that is not step_N is fine, for copies."""
    if type(step) is not int or step < 0:
        raise DamagedCheckpoint(f"{folder / NAME}: its step {step!r} is not a step number")
    if step_in_name(folder) not in (None, step):
        raise DamagedCheckpoint(
            f"{folder}: holds step {step} according to its {NAME}. If it was renamed, rename it to step_{step:08d}"
        )


def _is_entry(name: str, entry: Any) -> bool:
    """Return whether an entry describes a file inside the folder itself."""
    plain = name == os.path.basename(name) and name not in ("", ".", "..") and "\0" not in name
    if not plain or not isinstance(entry, dict) or type(entry.get("bytes")) is not int:
        return False
    return isinstance(entry.get("sha256"), str) and SHA256.fullmatch(entry["sha256"]) is not None


def _files_read(folder: Path) -> set[str]:
    """Return the names of the files that a reader of this checkpoint may open."""
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise unreadable(folder, error) from None
    return {name for name in names if name in SMALL or name.endswith(SHARD)} | set(REQUIRED)


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file that may be intact, but cannot be read now."""
    return CheckpointError(
        f"{path}: cannot be read: {error.strerror or error}. Make it readable for this user, or check its disk. "
        "To resume from the checkpoint before it, move this one away."
    )


def verify(folder: Path, part: int = 0, parts: int = 1, moved: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Check a checkpoint's files against its manifest, or every `parts`-th of them. Return the manifest.

    moved: Called whenever something has been read. Other files (.DS_Store, .nfs0001) are ignored: nothing reads them.
    """
    content = read(folder)
    files = content["files"]
    for name in sorted(files)[part::parts]:
        _check_file(folder / name, files[name], moved)
    return content


def check_sizes(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Raise DamagedCheckpoint if a file is missing or has another size than its entry; read none of them."""
    for name in sorted(files):
        _check_file(folder / name, files[name])


def _check_file(path: Path, expected: dict[str, Any], moved: Callable[[], None] | None = None) -> None:
    """Compare a file's size with its entry, and its content if anyone waits to hear that the reading has `moved`."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DamagedCheckpoint(f"{path}: not a file")
        if found.st_size != expected["bytes"]:
            raise DamagedCheckpoint(f"{path}: {found.st_size:,} bytes, its manifest says {expected['bytes']:,}")
        if moved and describe(path, moved)["sha256"] != expected["sha256"]:
            raise DamagedCheckpoint(f"{path}: its content changed (sha256 differs from the manifest's)")
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path}: missing") from None
    except OSError as error:
        raise unreadable(path, error) from None
