"""What makes a checkpoint complete: a manifest, written last, with the size and sha256 of every file."""

import hashlib
import json
from pathlib import Path
from typing import Any

from megatron_blackmamba.formats import atomic

NAME = "manifest.json"
VERSION = 1
CHUNK = 1 << 22


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as things are; the message names it, the file and what is wrong."""


class DamagedCheckpoint(CheckpointError):
    """What lies there is not what was written. A disk that does not answer, or another version's format, is no such."""


def describe(path: Path) -> dict[str, Any]:
    """A file's entry in the manifest."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def write(folder: Path, step: int, files: dict[str, dict[str, Any]], facts: dict[str, Any]) -> None:
    """Declare the checkpoint complete."""
    content = {"format": VERSION, "step": step, **facts, "files": dict(sorted(files.items()))}
    atomic.write_json(folder / NAME, content)


def read(folder: Path) -> dict[str, Any]:
    """The manifest, if it is one."""
    path = folder / NAME
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{folder}: no {NAME}: it was never finished") from None
    except OSError as error:
        raise unreadable(path, error) from None
    except ValueError as error:
        raise DamagedCheckpoint(f"{path}: not a manifest: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("files"), dict) or "step" not in content:
        raise DamagedCheckpoint(f"{path}: not a checkpoint's manifest")
    if content.get("format") != VERSION:
        raise CheckpointError(
            f"{path}: format {content.get('format')!r}; this version of megatron_blackmamba reads format {VERSION}"
        )
    return content


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The file may be as it was written; the file system does not hand it out now."""
    return CheckpointError(f"{path}: cannot be read: {error.strerror or error}")


def verify(folder: Path, part: int = 0, parts: int = 1) -> dict[str, Any]:
    """Check a checkpoint's files against its manifest, or every `parts`-th of them; returns the manifest.

    Files that the manifest does not know (.DS_Store, .nfs0001) are nobody's concern: nothing reads them.
    """
    content = read(folder)
    files = content["files"]
    for name in sorted(files)[part::parts]:
        _verify_file(folder / name, files[name])
    return content


def _verify_file(path: Path, expected: dict[str, Any]) -> None:
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise DamagedCheckpoint(f"{path}: {size:,} bytes, its manifest says {expected['bytes']:,}")
        if describe(path)["sha256"] != expected["sha256"]:
            raise DamagedCheckpoint(f"{path}: its content changed (sha256 differs from the manifest's)")
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path}: missing") from None
    except OSError as error:
        raise unreadable(path, error) from None
