"""Lock a run folder for one job: two would overwrite each other's checkpoints and records."""

import contextlib
import errno
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import NoReturn

FLOCK = "hhqqi4x"
"""C's struct flock on 64-bit Linux: type, whence, start, length, process."""
RANK, LAUNCHER = 0, 1
"""Which byte of the file each locks."""
LAUNCHED_BY = "BLACKMAMBA_LAUNCHER"
"""Environment variable of ranks: the process of their launcher."""


class RunInUse(ValueError):
    """Another job trains in this folder; the message says which."""

    worth_another_try = True  # a node that was lost may hold the lock for some minutes


class Lock:
    """A lock on a run folder, held until the process ends, however it ends. File systems without locks are trusted.

    Rank 0 holds one byte of the file while it trains. A launcher holds another, also while it starts ranks again.
    """

    def __init__(self, path: Path, launcher: bool = False) -> None:
        self.path, self._bytes = path, (LAUNCHER, RANK) if launcher else (RANK, LAUNCHER)
        self._file: int | None = None
        self._made = [made for made in (path, path.parent, path.parent.parent) if not made.exists()]
        self._take()

    @property
    def lost(self) -> bool:
        """Return whether the file was removed, moved or replaced."""
        try:
            return self._file is None or not os.path.samestat(os.fstat(self._file), os.stat(self.path))
        except OSError:
            return True

    def restore(self) -> bool:
        """Take the lock again if it is lost, and return whether it was."""
        if not self.lost:
            return False
        self.release()
        self._take()
        return True

    def _take(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        own, other = self._bytes
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, own)  # unlike flock, not kept by forked writers
            holder = _holder(file, other, 1)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                self._refuse()
            return
        if holder is not None and str(holder) != os.environ.get(LAUNCHED_BY):
            self._refuse()
        if holder is None:
            with contextlib.suppress(OSError):  # a full disk
                os.ftruncate(file, 0)
                os.write(file, f"process {os.getpid()}{_on_this_host()}".encode())

    def _refuse(self) -> NoReturn:
        assert self._file is not None
        who = os.pread(self._file, 200, 0).decode(errors="replace").strip()
        self.release()
        raise RunInUse(
            f"{self.path.parent} is in use by {who or 'another process'}: wait for it, stop it, or write elsewhere"
            " (train: name=OTHER; quickstart and study: --folder OTHER)"
        ) from None

    def discard(self) -> None:
        """Give the lock back. Remove its file and the folders around it if it made them and they hold nothing else."""
        for made in self._made:
            with contextlib.suppress(OSError):
                made.unlink() if made == self.path else made.rmdir()
        self.release()

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def is_held(path: Path) -> bool | None:
    """Return whether another process holds a run's lock; None if that cannot be known here.

    The lock is only queried, never taken, so that a job that starts now is not refused. Other nodes' locks are visible
    only on some shared file systems: a free lock proves nothing unless a process of this host took it last.
    """
    try:
        with open(path, "rb") as file:
            if _holder(file.fileno(), 0, 0) is not None:
                return True
            return False if file.read(200).endswith(_on_this_host().encode()) else None
    except OSError:
        return None


def _holder(file: int, start: int, length: int) -> int | None:
    """Return the process that holds a part of the file, or None; a length of 0 is to the end."""
    query = struct.pack(FLOCK, fcntl.F_RDLCK, os.SEEK_SET, start, length, 0)
    kind, _, _, _, process = struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, query))
    return None if kind == fcntl.F_UNLCK else process


def _on_this_host() -> str:
    return f" on {socket.gethostname()}\n"
