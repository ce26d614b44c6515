"""Files of lines that only grow: a full disk, a crash, a damaged line, a removed or moved file costs no other lines."""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.run_folder import WAITING

LAST_SECONDS = 5.0
"""How long the end of a run waits for a full disk to take the last lines."""


class LineFile:
    """A file to which whole lines are appended, made with the first; lines that cannot be written wait in memory."""

    def __init__(self, path: Path, say: Callable[[str], None] = print) -> None:
        self.path, self._say = path, say
        self.waiting: list[bytes] = []
        """Lines not yet written."""
        self.problem = ""
        """Why they could not be written."""
        self._file: int | None = None
        self._marker = path.with_name(path.name + WAITING)
        self._marked = True
        """The marker exists, or one of an earlier run may."""

    def write(self, line: str) -> None:
        self.waiting.append(line.encode() + b"\n")
        self.flush()

    def flush(self) -> bool:
        """Try to write the lines that wait; return whether all are written."""
        news = ""
        try:
            if self._file is not None and _is_removed(self._file):
                news = "was removed, with its earlier lines; a new file takes the next ones"
            elif self._file is not None and _is_missing(self.path):
                _copy(self._file, self.path)
                news = f"was moved{_moved_to(self._file)}; its lines are copied, and the next ones follow here"
            if self._file is not None and news:
                os.close(self._file)
                self._file = None
            if self._file is None:
                self._file = _open_for_lines(self.path)
            if self.waiting:
                self._append(self._file)
        except OSError as error:
            self.problem = error.strerror or str(error)
        self._mark(bool(self.waiting))
        if news:
            self._say(f"{self.path}: {news}")
        return not self.waiting

    def _mark(self, waits: bool) -> None:
        """Let other processes know whether lines wait: a full disk has room for an empty file."""
        with contextlib.suppress(OSError):
            if waits and not self._marker.exists():
                self._marker.touch()
            elif not waits and self._marked:
                self._marker.unlink(missing_ok=True)
            self._marked = waits

    def _append(self, file: int) -> None:
        content = b"".join(self.waiting)
        written = os.write(file, content)
        whole = content.rfind(b"\n", 0, written) + 1
        del self.waiting[: content.count(b"\n", 0, whole)]
        if whole < written:  # the disk became full within a line: take back its beginning
            os.truncate(file, os.fstat(file).st_size - (written - whole))
        if self.waiting:
            self.problem = os.strerror(errno.ENOSPC)

    def truncate(self, size: int) -> None:
        """Cut the file. Lines that wait stay."""
        if self._file is not None:
            os.truncate(self._file, size)

    def set_aside(self, whole: Callable[[bytes], object]) -> str | None:
        """Move the lines that `whole` returns None for into a file beside this one. Return what was done, in words."""
        with open(self.path, "rb") as file:
            if all(whole(line) is not None for line in file):
                return None
        with open(self.path, "rb") as file:
            lines = file.readlines()
        bad = [line for line in lines if whole(line) is None]
        aside = self.path.with_name(f"{self.path.name}.damaged")
        with open(aside, "ab") as file:
            file.writelines(line.rstrip(b"\n") + b"\n" for line in bad)
        atomic.write_bytes(self.path, b"".join(line for line in lines if whole(line) is not None))
        if self._file is not None:  # follow the path to the file that has taken its place
            os.close(self._file)
            self._file = None
        self.flush()
        return f"{self.path}: {len(bad)} damaged lines set aside in {aside.name}"

    def close(self) -> str | None:
        """Write what waits, trying for LAST_SECONDS, and close. Return what is missing, in words."""
        end = time.monotonic() + LAST_SECONDS
        while not self.flush() and time.monotonic() < end:
            time.sleep(0.2)
        missing = (
            f"{self.path}: {len(self.waiting)} lines could not be written: {self.problem}" if self.waiting else None
        )
        self._mark(False)
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._file)
            os.close(self._file)
            self._file = None
        return missing


def _is_removed(file: int) -> bool:
    """Return whether nothing written to an open file can be found again. A removed file on NFS is stale."""
    try:
        return os.fstat(file).st_nlink == 0
    except OSError as error:
        return error.errno == errno.ESTALE


def _is_missing(path: Path) -> bool:
    """Return whether a path leads nowhere; a disk that does not answer tells nothing."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def _moved_to(file: int) -> str:
    """Return where an open file is now, in words; nothing where that cannot be known."""
    with contextlib.suppress(OSError):
        return f" to {os.readlink(f'/proc/self/fd/{file}')}"
    return ""


def _copy(file: int, path: Path) -> None:
    """Write what an open file holds to a new path."""
    with open(os.dup(file), "rb") as old, atomic.atomic_file(path) as new:
        old.seek(0)
        shutil.copyfileobj(old, new)


def _open_for_lines(path: Path) -> int:
    """Open a file for appending lines. Drop a last line that a crash cut short; set aside what is no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        os.replace(path, path.with_name(f"{path.name}.damaged"))
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.truncate(file, _end_of_last_line(path))
    except OSError:
        os.close(file)
        raise
    return file


def _end_of_last_line(path: Path) -> int:
    """Return the number of bytes up to the last newline."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        while size:
            start = max(0, size - 65536)
            file.seek(start)
            newline = file.read(size - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            size = start
    return 0
