"""If one rank fails, end all ranks, and print the traceback of the cause first.

An error that several ranks of one launcher run into is printed once.
"""

import fcntl
import hashlib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from megatron_blackmamba.console import interrupts

LOST_CONTACT = re.compile(
    r"connection (was likely )?(reset|closed|refused)|broken pipe|timed out waiting|pair closure|store->get"
    r"|remote process|communicator was aborted",
    re.IGNORECASE,
)
"""What gloo, NCCL and PyTorch's store say when a peer has gone."""
LET_THE_CAUSE_SPEAK = 5.0
"""Seconds that a rank which merely lost its peers waits, so that the failing rank's message stands on top."""

SAID = interrupts.LAUNCHER_SPEAKS
"""Environment variable: the file in which the ranks of a launcher note the errors that they have printed."""


def say_once(error: str, say: Callable[[], None]) -> bool:
    """Call `say` unless another rank of this launcher has printed the same error; return whether it was called."""
    note = hashlib.sha256(error.encode(errors="replace")).hexdigest() + "\n"
    try:
        file = open(os.environ[SAID], "a+", encoding="utf-8")  # noqa: SIM115
    except (KeyError, OSError):  # a rank with a log of its own
        say()
        return True
    with file:
        fcntl.lockf(file, fcntl.LOCK_EX)  # until it is printed: the launcher ends the others when one has ended
        file.seek(0)
        if note in file:
            return False
        say()
        file.write(note)
        return True


def report_as(rank: int, size: int) -> None:
    """Make an uncaught exception name this rank and end the process at once, without waiting for other ranks."""

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        err = (
            sys.__stderr__ or sys.stderr
        )  # torch's own hook calls this one with sys.stderr swapped for a buffer, lost when we exit
        try:
            what = "failed"
            if size > 1 and _is_consequence(error):
                time.sleep(LET_THE_CAUSE_SPEAK)
                what = "lost another rank"
            text = "".join(traceback.format_exception(kind, error, trace))
            who = f"rank {rank} of {size} {what}:\n" if size > 1 else ""
            if not say_once(text, lambda: print(f"{who}{text}", end="", file=err, flush=True)):
                print(f"rank {rank} of {size} {what} in the same way", file=err)
            sys.stdout.flush()
            err.flush()
        finally:
            os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = end


def report_as_alone() -> None:
    """Give uncaught exceptions back to Python."""
    sys.excepthook = sys.__excepthook__


def _is_consequence(error: BaseException) -> bool:
    import torch.distributed as dist

    if isinstance(error, (dist.DistNetworkError, ConnectionError)):
        return True
    return isinstance(error, RuntimeError) and bool(LOST_CONTACT.search(str(error)))


def first_line(error: BaseException) -> str:
    """Return what an error says in a line of a log."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
