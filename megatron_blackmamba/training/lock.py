"""Lock a run folder for one job: two would overwrite each other's checkpoints and records."""

import contextlib
import errno
import fcntl
import os
import socket
import struct
from pathlib import Path

FLOCK = "hhqqi4x"
"""C's struct flock on 64-bit Linux: type, whence, start, length, process."""


class RunInUse(ValueError):
    """Another job trains in this folder; the message says which."""


class Lock:
    """Held by rank 0 until its process ends, however it ends. File systems without locks are trusted."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._file: int | None = file
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock, not kept by forked writers
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                who = os.read(file, 200).decode(errors="replace").strip()
                self.release()
                raise RunInUse(
                    f"{path.parent} is in use by {who or 'another process'}: wait for it, stop it, or name this run"
                    " otherwise (name=...)"
                ) from None
            return
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(file, 0)
            os.write(file, f"process {os.getpid()}{_on_this_host()}".encode())

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
            query = struct.pack(FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
            if struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, query))[0] != fcntl.F_UNLCK:
                return True
            return False if file.read(200).endswith(_on_this_host().encode()) else None
    except OSError:
        return None


def _on_this_host() -> str:
    return f" on {socket.gethostname()}\n"
