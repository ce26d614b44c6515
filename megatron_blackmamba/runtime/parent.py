"""Processes that end when the process that started them does, however that one ends, and keep its priority."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends. Call it first, in the child.

    parent: process id of the parent, to notice that it died before this call. The kernel watches the parent's
    *thread*: start the child from one that lives as long as the process, such as the main thread. Linux only.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def keep_priority() -> None:
    """Give the session that this process began the priority of the process itself.

    Linux often shares the processors between sessions first, and heeds priorities only inside one. So a session of a
    low process would get as much as all that its parent's session runs.
    """
    if os.nice(0) > 0 and os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # no such kernel
            Path("/proc/self/autogroup").write_text(str(os.nice(0)), encoding="utf-8")


def follow_parent(parent: int) -> None:
    """Die with the parent and keep its priority, in a session of this process's own."""
    die_with_parent(parent)
    keep_priority()


def main() -> None:
    """Become the command in the arguments, ending with the process named before it."""
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # the kernel keeps the request


if __name__ == "__main__":
    main()
