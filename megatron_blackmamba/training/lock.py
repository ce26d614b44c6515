"""Lock a run folder for one job: two would overwrite each other's checkpoints and records."""

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path


class RunInUse(ValueError):
    """Another job trains in this folder; the message says which."""


class Lock:
    """Held by rank 0 until its process ends, however it ends. File systems without locks are trusted."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock, not kept by forked writers
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                who = os.read(self._file, 200).decode(errors="replace").strip()
                raise RunInUse(
                    f"{path.parent} is in use by {who or 'another process'}: wait for it, stop it, or name this run"
                    " otherwise (name=...)"
                ) from None
            return
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(self._file, 0)
            os.write(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def release(self) -> None:
        os.close(self._file)
