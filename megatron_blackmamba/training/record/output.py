"""Lines for standard output, which may lie on a full disk."""

import contextlib
import errno
import os
import sys
from typing import IO

WAIT_FOR = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EAGAIN}
"""Errors that may pass. After others, as when the terminal is gone, lines are dropped."""


class Output:
    """Lines for a file. What a full disk refuses of standard output waits and is written before the next line."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._waiting = b""

    def write(self, line: str) -> None:
        """Write a line, after those that wait. Training goes on if that cannot be done."""
        if self._file is not sys.__stdout__:  # no plain file: a notebook's cell, or a test's text
            with contextlib.suppress(OSError):
                print(line, file=self._file, flush=True)
            return
        self._waiting += f"{line}\n".encode(self._file.encoding or "utf-8", errors="replace")
        self._drain()

    def _drain(self) -> None:
        try:
            self._file.flush()
            while self._waiting:  # a write may end within a line; the rest of it follows later
                self._waiting = self._waiting[os.write(self._file.fileno(), self._waiting) :]
        except OSError as error:
            if error.errno not in WAIT_FOR:
                self._waiting = b""
