"""Functions shared by the benchmarks: time peers in turns, describe the machine, print a table.

Every peer runs once per round, so other load on the machine affects all of them. On CPUs with one thread the clock is
the process's CPU time, otherwise wall time; on GPUs it waits for the device.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def arguments(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes: --repeats, --threads, --device, --json."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=defaults.get("repeats", 5))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    return parser


def settle(calls: Iterable[Callable[[], Any]], rounds: int = 6) -> None:
    """Repeat the calls until a round no longer raises the peak memory of the process.

    If freed memory is kept, calls of different sizes share it, and the process grows for some rounds. The kernel clears
    every new page, which would take a good part of a measured call.
    """
    calls = list(calls)
    for _ in range(rounds):
        before = _peak_of_memory()
        for call in calls:
            call()
        if _peak_of_memory() <= before * 1.001:
            return


def _peak_of_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def interleaved(
    peers: dict[str, Callable[[], Any]],
    *,
    repeats: int,
    device: str = "cpu",
    patience: float = 30.0,
    uncounted: int = 1,
) -> dict[str, list[float]]:
    """Seconds of each call of each peer. An uncounted round comes first; a peer that has used up `patience` seconds in
    all sits out the remaining rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    used = dict.fromkeys(peers, 0.0)
    for round_ in range(repeats + uncounted):
        for name, call in peers.items():
            if seconds[name] and used[name] > patience:
                continue
            elapsed = timed(call, device)
            used[name] += elapsed
            if round_ >= uncounted or elapsed > patience:
                seconds[name].append(elapsed)
    return seconds


def timed(call: Callable[[], Any], device: str = "cpu") -> float:
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    _wait_for(device)
    start = clock()
    call()
    _wait_for(device)
    return clock() - start


def median(seconds: Sequence[float]) -> float:
    return statistics.median(seconds)


def machine(*packages: str) -> dict[str, Any]:
    """Describe this machine and the versions of `packages`, for the figures measured on it."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def show(result: dict[str, Any], as_json: bool) -> None:
    """Print {"machine": …, "tables": {title: rows}, "notes": […]}, each row a dict with the columns as keys."""
    if as_json:
        print(json.dumps(result, indent=2))
        return
    where = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    print(f"{where['gpu'] or where['cpu']}, {where['threads']} of {where['cores']} cores; {versions}; {where['date']}")
    for title, rows in result["tables"].items():
        print(f"\n{title}")
        print(table(rows))
    for note in result.get("notes", []):
        print(f"\n{note}")


def table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def _wait_for(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
