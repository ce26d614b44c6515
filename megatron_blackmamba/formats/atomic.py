"""Files and folders that appear whole or not at all: written beside their place, flushed to disk, then renamed."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from megatron_blackmamba.console import interrupts
from megatron_blackmamba.formats import leftovers

NOT_WHOLE = "could not be written whole, as on a full disk or beyond a quota"
"""What is known of a failed write of a library that hides the disk's answer."""


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary neighbour of `path` for writing; it takes its name only if the block ends without an error."""
    path = Path(path)
    if path.is_dir():  # . and / too, which have no name
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = leftovers.beside(path)
    try:
        with interrupts.unfinished(temporary):
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:  # a full disk is noticed by calls that do not name the file
            error.filename, error.filename2 = str(path), None
        elif hides_failed_write(error):
            raise OSError(errno.ENOSPC, NOT_WHOLE, str(path)) from error
        raise


def hides_failed_write(error: BaseException) -> bool:
    """Return whether an error is a failed write of torch, numpy or a library in Rust, which give no errno."""
    if isinstance(error, OSError):
        return not error.errno and "requested and" in str(error)  # numpy's tofile
    causes = [error.__cause__, *getattr(error, "failures", {}).values()]  # the latter: torch's CheckpointException
    inner = [cause[0] if isinstance(cause, tuple) else cause for cause in causes if cause is not None]
    told = any(words in str(error) for words in ("inline_container", "(os error 28)", "(os error 122)"))
    return told or any(isinstance(each, BaseException) and hides_failed_write(each) for each in inner)


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    with atomic_file(path) as file:
        file.write(content)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    write_bytes(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """Return the content of a JSON file."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def publish(temporary: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Give a finished temporary file, on the same file system, its final name."""
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    sync_folder(Path(path).parent)


@contextlib.contextmanager
def replaced(path: Path, aside: Path) -> Iterator[None]:
    """Free the name of a folder, if there is one, for the block. Then remove the folder; an error brings it back."""
    exists = path.exists()
    if exists:
        os.rename(path, aside)
    try:
        yield
    except BaseException:
        if exists:
            with contextlib.suppress(OSError):
                os.rename(aside, path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def bring_back(folder: Path, suffix: str) -> None:
    """Rename `.NAME<suffix>` to NAME again where a process was killed inside `replaced`."""
    for aside in folder.glob(f".*{suffix}"):
        path = aside.with_name(aside.name[1:].removesuffix(suffix))
        if not path.exists():
            os.rename(aside, path)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make renames inside `folder` survive a power cut, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems refuse fsync on a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
