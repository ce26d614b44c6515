"""Faults of a disk, caused for real in the process that uses it: the k-th operation on a folder fails.

Counts what a process and the writer forked from it do: open, create, rename, list, remove and sync files.
"""

import contextlib
import errno
import mmap
import os
import resource
import shutil
import signal
import struct
import sys
from pathlib import Path

AUDITED = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}
FULL = errno.ENOSPC


class Disk:
    """A watcher of one folder inside this process; `arm` says which operation fails, and how."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.main = str(folder), os.getpid()
        self._shared = mmap.mmap(-1, 8)  # operations seen, by this process and its forks
        self._kinds = mmap.mmap(-1, 4096)  # the kind of each
        self._fail_at, self._how, self._busy = 0, "", False
        self._limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        sys.addaudithook(self._audit)
        self._fsync, os.fsync = os.fsync, self._counted_fsync

    def arm(self, fail_at: int, how: str) -> None:
        """Make operation number `fail_at` from now on fail; 0 means none.

        `how` is one of:
            - "refused": ENOSPC
            - "full": the file opens, but nothing can be written from then on
            - "removed": the folder is removed just before
            - "killed": the writer process dies, if the operation is the writer's
        """
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limit)
        self._shared[:] = struct.pack("q", 0)
        self._fail_at, self._how = fail_at, how

    @property
    def operations(self) -> int:
        return struct.unpack("q", self._shared[:])[0]

    def kinds(self) -> str:
        """Return a letter an operation so far: creates a file, reads, syncs, or changes names; capitals: the writer."""
        return self._kinds[1 : self.operations + 1].decode()

    def _audit(self, event: str, arguments: tuple) -> None:
        if event in AUDITED and not self._busy and str(arguments[0]).startswith(self.folder):
            creates = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            self._operation(b"c" if creates else b"r" if event in ("open", "os.scandir", "os.listdir") else b"n")

    def _counted_fsync(self, file: int) -> None:
        self._operation(b"s")
        self._fsync(file)

    def _operation(self, kind: bytes) -> None:
        number = self.operations + 1
        self._shared[:] = struct.pack("q", number)
        self._kinds[number : number + 1] = kind if os.getpid() == self.main else kind.upper()
        if number != self._fail_at:
            return
        if self._how == "refused":
            raise OSError(FULL, os.strerror(FULL))
        if self._how == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, self._limit[1]))
        if self._how == "removed":
            self._busy = True
            shutil.rmtree(self.folder, ignore_errors=True)
            self._busy = False
        if self._how == "killed" and os.getpid() != self.main:
            with contextlib.suppress(OSError):
                os.kill(os.getpid(), signal.SIGKILL)
