"""Processes that end when the process that started them does, however that one ends."""

import ctypes
import os
import signal
import sys

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


def main() -> None:
    """Become the command in the arguments, of lowest priority, ending with the process named before it."""
    die_with_parent(int(sys.argv[1]))
    os.nice(19)
    os.execv(sys.argv[2], sys.argv[2:])  # the kernel keeps the request


if __name__ == "__main__":
    main()
