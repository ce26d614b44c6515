"""The processor of this machine, and its memory as far as the control group lets this process use it. No torch."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path

GROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")
VERSIONS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files with the limit and the use of a control group, and the part of its memory.stat that the kernel can free."""


def memory() -> tuple[int, int]:
    """Return the total and the free bytes."""
    total, free = _of_machine()
    for group in _own_groups():
        for limit, used, cached in VERSIONS:
            if (most := _number(group / limit)) is not None:
                taken = (_number(group / used) or 0) - _counter(group / "memory.stat", cached)
                total, free = min(total, most), min(free, most - taken)
    return total, free


def killed_for_memory() -> int:
    """Return how many processes the kernel has killed for lack of memory here so far; 0 where it does not say."""
    files = [group / name for group in _own_groups() for name in ("memory.events", "memory.oom_control")]
    counts = (_counter(file, "oom_kill") for file in (*files, PROC / "vmstat") if file.is_file())
    return next(counts, 0)


def processor() -> str:
    """Return the name of the processor."""
    return cpuinfo("model name") or platform.processor() or platform.machine()


def cpuinfo(key: str) -> str:
    """Return what the kernel says of the first processor; nothing where it says nothing."""
    return next((line.partition(":")[2].strip() for line in _lines(PROC / "cpuinfo") if line.startswith(key)), "")


def _of_machine() -> tuple[int, int]:
    kib = {key: rest.split()[0] for key, _, rest in (line.partition(":") for line in _lines(PROC / "meminfo"))}
    if "MemTotal" in kib and "MemAvailable" in kib:
        return int(kib["MemTotal"]) * 1024, int(kib["MemAvailable"]) * 1024
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return pages, pages


def _own_groups() -> Iterator[Path]:
    """Yield the folders of this process's control group and of the groups around it, of both versions."""
    for line in _lines(PROC / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = GROUPS / controllers  # version 2 has no controllers here
        inside = top / path.lstrip("/")
        yield from (each for each in (inside, *inside.parents) if each.is_relative_to(top) and each.is_dir())


def _number(file: Path) -> int | None:
    """Return the number in a file; None without a file, or where it says "max"."""
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _counter(file: Path, name: str) -> int:
    """Return the number behind a name in a file; 0 without one."""
    return next((int(line.split()[1]) for line in _lines(file) if line.startswith(f"{name} ")), 0)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8").splitlines()
    except OSError:
        return []
