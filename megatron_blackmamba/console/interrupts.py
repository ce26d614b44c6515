"""Ctrl-C: one line, exit code 130, nothing half-made, whatever is running.

`watch()` blocks SIGINT in the whole process and gives it to one thread, which ends the process. So no exception runs
through a library that is being imported or computes in C. Processes started later inherit the block and end with this
one. Work that leaves files behind says how to undo it with `undoing` or `unfinished`. If a command installs a handler
of its own for SIGINT, that one is called instead.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

INTERRUPTED = 130
LONGEST_SECONDS = 5.0
"""Time to undo what is half-made; the process ends then in any case."""
LAUNCHER_SPEAKS = "BLACKMAMBA_SAID"
"""Environment variable of processes whose launcher prints the line."""
_SHOW_CURSOR = "\x1b[?25h"

_undo: list[Callable[[], None]] = []
_advice: list[str] = []
_stopped = threading.Event()
_ending = threading.Lock()
"""Held by the thread that ends the process, or by the interpreter once it shuts down by itself."""


def watch() -> None:
    """End this process on SIGINT from now on. The main thread calls this first; ignored signals stay ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return
    signal.signal(signal.SIGINT, _in_main_thread)  # not the default one, which asyncio would replace
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the thread takes none but SIGINT
    warnings = filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"))
    os.environ["PYTHONWARNINGS"] = ",".join(warnings)  # of the process that tidies up after worker pools
    threading.Thread(target=_wait, name="interrupts", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, {*before, signal.SIGINT})
    atexit.register(_ending.acquire)  # registered first, so called last: it has ended, or it is interrupted


def _wait() -> None:
    while True:
        signal.sigwait({signal.SIGINT})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.raise_signal(signal.SIGINT)  # Python calls the handler in the main thread: ours, or a command's own
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        if signal.getsignal(signal.SIGINT) is _in_main_thread:
            _stopped.wait(LONGEST_SECONDS / 10)  # unless it computes in C
            leave()


def _in_main_thread(*_: object) -> None:
    """Stop the main thread here for ever, so that it makes no new files while others are removed."""
    _stopped.set()
    leave()


def leave() -> None:
    """Print one line, end the processes of this one, undo what is half-made, and exit with 130."""
    _ending.acquire()
    timer = threading.Timer(LONGEST_SECONDS, os._exit, (INTERRUPTED,))
    timer.daemon = True
    timer.start()
    if os.environ.get("RANK", "0") == "0" and LAUNCHER_SPEAKS not in os.environ:
        say()
    _mute()
    undo = _undo[::-1]  # the main thread runs on, and may leave the blocks that these belong to
    _call(undo)  # first, or it would take killed processes for finished ones and publish what they left
    with contextlib.suppress(OSError):
        _kill_descendants()
    _call(undo)
    os._exit(INTERRUPTED)


def _call(undo: list[Callable[[], None]]) -> None:
    for each in undo:
        with contextlib.suppress(Exception):
            each()


@contextlib.contextmanager
def undoing(undo: Callable[[], None]) -> Iterator[None]:
    """Have an interrupt call `undo` in another thread: before and after it ends the processes of this one."""
    _undo.append(undo)
    try:
        yield
    finally:
        _undo.remove(undo)


def unfinished(path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[None]:
    """Have an interrupt remove a file or folder."""
    return undoing(lambda: remove(path))


@contextlib.contextmanager
def advice(text: str) -> Iterator[None]:
    """Add to the line of an interrupt what the user should know."""
    _advice.append(text)
    try:
        yield
    finally:
        _advice.pop()


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a file or folder that the main thread may still write into: it is renamed first."""
    path = os.fspath(path)
    aside = f"{path}.{os.getpid()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        for folder, folders, files in os.walk(aside, topdown=False):  # an import could wait for the main thread
            for name in files:
                os.unlink(os.path.join(folder, name))
            for name in folders:
                inside = os.path.join(folder, name)
                (os.unlink if os.path.islink(inside) else os.rmdir)(inside)
        (os.rmdir if os.path.isdir(aside) else os.unlink)(aside)


def spawn_context() -> Any:
    """Return multiprocessing's context for workers that start afresh, and ignore SIGINT: they end with this process."""
    import multiprocessing
    from multiprocessing import resource_tracker

    keep_blocked(resource_tracker.ensure_running)
    return multiprocessing.get_context("spawn")


def keep_blocked(start_tracker: Callable[[], None]) -> None:
    """Start Python's resource tracker, which would otherwise unblock SIGINT when the first worker starts."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    start_tracker()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def say() -> None:
    """Print the line of an interrupt."""
    terminal = os.isatty(2)
    before = f"\n{_SHOW_CURSOR}" if terminal else ""  # the terminal has printed ^C, or a display stands there
    line = f"{before}blackmamba: {'; '.join(['interrupted', *_advice])}\n"
    with contextlib.suppress(OSError):
        os.write(2, line.encode(errors="replace"))
        if not terminal and os.isatty(1):
            os.write(1, _SHOW_CURSOR.encode())


def _mute() -> None:
    """Discard what other threads and libraries print from now on."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)


def _kill_descendants() -> None:
    """Kill the processes that this one has started, and theirs, until none is left. Linux only."""
    if sys.platform != "linux":
        return
    while found := _descendants():
        for number in found:
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.01)


def _descendants() -> set[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            number = int(name)
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                parents[number] = int(parent)
    found: set[int] = set()
    grown = {os.getpid()}
    while grown:
        grown = {number for number, parent in parents.items() if parent in grown} - found
        found |= grown
    return {number for number in found if not _tracks_resources(number)}


def _tracks_resources(number: int) -> bool:
    """Return whether this is Python's process that removes named semaphores when this one has ended."""
    try:
        with open(f"/proc/{number}/cmdline", "rb") as file:
            return b"resource_tracker" in file.read()
    except OSError:
        return True
