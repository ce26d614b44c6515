"""Temporary neighbours of an output, named after the process that writes them, and the removal of abandoned ones.

A name is `.OUTPUT.KERNEL.PROCESS-START.RANDOM.tmp`. KERNEL stands for one boot of one machine and one namespace of
processes: only there can a process be looked up, so nothing that another host may be writing is ever removed.
"""

import contextlib
import glob
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_blackmamba.console import interrupts

LONGEST_NAME = 255
HIDDEN = "?"
_NAMED = re.compile(r"\.([0-9a-f]{8})\.(\d+)-(\d+)\.[0-9a-f]{8}\.tmp(\.\d+\.tmp)?")
"""What follows the name of the output; an interrupt that was killed itself has added an end."""
_UNOWNED = re.compile(r"\.[0-9a-f]{8}\.tmp(\.\d+\.tmp)?")
"""The same of earlier versions and of very long names."""


def beside(path: Path) -> Path:
    """Return a new name next to an output, for what becomes it."""
    process, random = os.getpid(), os.urandom(4).hex()
    name = f".{path.name}.{_kernel()}.{process}-{_start(process) or 0}.{random}.tmp"
    return path.with_name(name if len(os.fsencode(name)) <= LONGEST_NAME else f".{path.name}.{random}.tmp")


def remove_abandoned(path: Path) -> Iterator[tuple[Path, int | None]]:
    """Remove what killed processes left next to an output; yield all others, with the process if it lives here."""
    for left in sorted(path.parent.glob(f".{glob.escape(path.name)}.*.tmp")):
        end = left.name.removeprefix(f".{path.name}")
        named = _NAMED.fullmatch(end)
        if named is not None and named[1] == _kernel():
            if _start(process := int(named[2])) in (named[3], HIDDEN):
                yield left, process
                continue
            with contextlib.suppress(OSError):  # another call removes it too
                interrupts.remove(left)
        elif named is not None or _UNOWNED.fullmatch(end):
            yield left, None


def tidy(path: Path) -> None:
    """Remove what killed processes left next to an output."""
    for _ in remove_abandoned(path):
        pass


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """Yield a folder for temporary files, which is removed, and remove those of killed processes."""
    path = Path(tempfile.gettempdir()).resolve() / name
    tidy(path)
    folder = beside(path)
    with interrupts.unfinished(folder):
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _start(process: int) -> str | None:
    """Return when a process started, in ticks since the boot; None if it has ended, HIDDEN if that cannot be read."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
        return None if state in (b"Z", b"X") else fields[18].decode()
    except OSError:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return HIDDEN


def _kernel() -> str:
    """Return a digest of this boot and namespace; a random one without /proc, so that nothing is removed."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            place = file.read() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return os.urandom(4).hex()
    return hashlib.sha256(place.encode()).hexdigest()[:8]
