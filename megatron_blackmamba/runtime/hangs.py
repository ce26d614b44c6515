"""Files for diagnosing a hang: a heartbeat of every rank during the run, and one report per rank after a hang.

A heartbeat is a small file, written by its own thread, so it does not slow down a step, and a slow disk cannot delay
the watchdog. It records what the rank is doing, where its main thread is, and how many collectives it has started in
each process group. Comparing the counts shows which ranks have not arrived.
"""

import contextlib
import faulthandler
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LONGEST_BEAT_S = 10.0
LONGEST_GRACE_S = 60.0
"""Longest time that a rank waits for the reports of the others before it exits."""
LONGEST_DUMP_S = 20.0
FLIGHT_RECORDER = "flight_recorder_rank_"
"""Prefix of the dumps; `torchfrtrace --prefix flight_recorder_rank_ FOLDER` reads them."""
PACKAGE = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True)
class Beat:
    """The latest heartbeat of a rank."""

    rank: int
    host: str
    start: str
    """Identifies the start of the job: files of an earlier one are ignored."""
    doing: str
    silent: float
    """Seconds since its main thread last made progress."""
    at: str
    """Innermost line of this package that its main thread is in."""
    hung: bool = False
    collectives: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each process group, by its name: description, ranks, and how many collectives this rank has started."""


@dataclass(frozen=True)
class Seen:
    """A beat, and how long ago it was written by the clock of the file system."""

    beat: Beat
    age: float


def patience(seconds: float) -> float:
    """Return the longest time that a report may take in a run with this `hang_seconds`."""
    return min(LONGEST_GRACE_S, seconds) + min(LONGEST_DUMP_S, seconds)


def start_id(environment: Mapping[str, str] = os.environ) -> str:
    """Return a name for this start of the job, the same on every rank."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
    return "-".join(environment[name] for name in names if environment.get(name)) or f"pid{os.getpid()}"


def record_collectives(environment: Any = os.environ) -> None:
    """Ask PyTorch to remember the last collectives; before the first process group is made."""
    from torch._C import _distributed_c10d as c10d

    environment.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if not hasattr(c10d, "_dump_fr_trace"):  # an older PyTorch, which knows another name
        environment.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", environment["TORCH_FR_BUFFER_SIZE"])


class Heartbeats:
    """The heartbeats of all ranks of one start, as files in `logs`; this rank writes its own."""

    def __init__(self, logs: Path, rank: int, size: int, seconds: float) -> None:
        self.rank, self.size, self.seconds, self.start = rank, size, seconds, start_id()
        logs = logs / os.environ.get("SLURM_JOB_ID", "")
        self.folder, self.reports = logs / "heartbeats", logs / f"hang-{self.start}"
        self.every = min(LONGEST_BEAT_S, seconds / 8)
        self.host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._began = 0.0
        self._writing = threading.Lock()

    def write(self, doing: str, silent: float, hung: bool = False) -> None:
        """Replace this rank's heartbeat."""
        beat = Beat(self.rank, self.host, self.start, doing, round(silent, 1), main_thread_at(), hung, collectives())
        path = self._path(self.rank)
        temporary = path.with_suffix(".tmp")
        with self._writing:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(asdict(beat)) + "\n", encoding="utf-8")
            os.replace(temporary, path)
            self._began = self._began or path.stat().st_mtime

    def read(self) -> dict[int, Seen]:
        """Return the newest heartbeat of every rank that has left one since the job started."""
        seen = {}
        now = self._path(self.rank).stat().st_mtime  # just written: the file system's clock, not this node's
        for rank in range(self.size):
            with contextlib.suppress(OSError, ValueError, TypeError):  # none yet, or unreadable
                path = self._path(rank)
                beat = Beat(**json.loads(path.read_text(encoding="utf-8")))
                if beat.start == self.start:
                    seen[rank] = Seen(beat, now - path.stat().st_mtime)
        return seen

    def is_alive(self, seen: Seen | None) -> bool:
        """Tell whether a rank still writes its heartbeat: its process runs, even if its main thread hangs."""
        return seen is not None and seen.age < self.seconds / 2

    def another_hangs(self) -> bool:
        """Tell whether a rank has begun to write reports of a hang since this one started."""
        return self._is_new(self.reports)

    def report(self, rank: int) -> Path:
        return self.reports / f"rank-{rank}.txt"

    def has_reported(self, rank: int) -> bool:
        """Tell whether a rank has written its report of a hang since this one started."""
        return self._is_new(self.report(rank))

    def _is_new(self, path: Path) -> bool:
        try:
            return 0 < self._began <= path.stat().st_mtime
        except OSError:
            return False

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"


def main_thread_at() -> str:
    """Return the innermost line of this package that the main thread is in, or else its innermost line."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost, at = "", ""
    while frame is not None and not at:
        code = frame.f_code
        line = f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
        innermost = innermost or line
        if code.co_filename.startswith(PACKAGE):
            at = line[len(PACKAGE) + 1 :]
        frame = frame.f_back
    return at or innermost


def collectives() -> dict[str, dict[str, Any]]:
    """Count the collectives that this rank has started in each of its process groups."""
    if "torch.distributed" not in sys.modules:
        return {}
    import torch.distributed as dist

    counted: dict[str, dict[str, Any]] = {}
    groups: dict[Any, Any] = dict(dist.distributed_c10d._world.pg_group_ranks) if dist.is_available() else {}
    for group, ranks in groups.items():
        with contextlib.suppress(RuntimeError, AttributeError):  # a backend that does not count
            started = group._get_sequence_number_for_group()
            if started:
                description = getattr(group, "group_desc", "") or group.group_name
                counted[group.group_name] = {"group": description, "ranks": sorted(ranks), "started": started}
    return counted


def missing(seen: dict[int, Seen], size: int, is_alive: Any) -> dict[int, str]:
    """Name the ranks that have not arrived, each with the reason: silent, never started, or behind the others."""
    named = {}
    for rank in range(size):
        if rank not in seen:
            named[rank] = f"rank {rank} has left no heartbeat: it never started, or cannot write to the run's folder"
        elif not is_alive(seen[rank]):
            named[rank] = f"{_who(seen[rank])} is stopped, dead, or its node is gone: {_where(seen[rank])}"
    furthest: dict[str, int] = {}
    for each in seen.values():
        if each.beat.rank in named:  # what it has started can be held up by its own stop
            continue
        for name, group in each.beat.collectives.items():
            furthest[name] = max(furthest.get(name, 0), group["started"])
    for rank, each in seen.items():
        behind = [
            f"{furthest[name]} of {group['group']} (ranks {_ranges(group['ranks'])}; it started {group['started']})"
            for name, group in each.beat.collectives.items()
            if group["started"] < furthest.get(name, 0)
        ]
        if behind and rank not in named:
            named[rank] = f"{_who(each)} has not arrived at collective {' and '.join(behind)}: {_where(each)}"
    return dict(sorted(named.items()))


def describe(seen: dict[int, Seen], size: int, is_alive: Any) -> str:
    """Say which ranks have not arrived, and after that where each rank is."""
    named = list(missing(seen, size, is_alive).values())
    if size > 1 and not named:
        named = ["every rank has started the same collectives: look at the network, the disk and the stacks"]
    everyone = [f"  {_who(seen[rank])}: {_where(seen[rank])}" for rank in sorted(seen)]
    return "\n".join([*named, "Where each rank is:", *everyone])


def _who(seen: Seen) -> str:
    return f"rank {seen.beat.rank} ({seen.beat.host})"


def _where(seen: Seen) -> str:
    beat = seen.beat
    return f"last seen {seen.age:.0f} s ago in {beat.doing!r}, begun {beat.silent:.0f} s before, at {beat.at}"


def _ranges(ranks: list[int]) -> str:
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def write_report(beats: Heartbeats, headline: str, doing: str, silent: float) -> None:
    """Write this rank's report, and return when the other live ranks have written theirs or the grace is over.

    A launcher ends all ranks when the first one exits, so no rank exits before the others are done.
    """
    deadline = time.monotonic() + min(LONGEST_GRACE_S, beats.seconds)
    beats.reports.mkdir(parents=True, exist_ok=True)  # the other ranks see it and report too
    os.utime(beats.reports)
    beats.write(doing, silent, hung=True)
    dump = threading.Thread(target=dump_flight_recorder, args=(beats.reports, beats.rank), daemon=True)
    dump.start()

    def others() -> dict[int, Seen]:
        return {rank: each for rank, each in beats.read().items() if rank != beats.rank and beats.is_alive(each)}

    while time.monotonic() < deadline and not all(each.beat.hung for each in others().values()):
        time.sleep(0.2)
        beats.write(doing, silent, hung=True)  # also the clock that ages are measured by
    found = describe(beats.read(), beats.size, beats.is_alive)
    print(found, file=sys.stderr, flush=True)
    dump.join(min(LONGEST_DUMP_S, beats.seconds))
    temporary = beats.report(beats.rank).with_suffix(".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(f"{time.strftime('%F %T')} {platform.node()}\n{headline}\n{found}\n\nStacks of its threads:\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    os.replace(temporary, beats.report(beats.rank))
    while time.monotonic() < deadline and not all(map(beats.has_reported, others())):
        time.sleep(0.2)
        beats.write(doing, silent, hung=True)


def dump_flight_recorder(folder: Path, rank: int) -> None:
    """Write PyTorch's record of the last collectives, where this PyTorch and backend keep one."""
    if "torch.distributed" not in sys.modules:
        return
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    backends = dist.get_backend() if dist.is_initialized() else ""
    take = getattr(c10d, "_dump_nccl_trace" if "nccl" in backends else "_dump_fr_trace", None)
    if take is not None:
        temporary = folder / f"dump-{rank}.tmp"
        temporary.write_bytes(take())
        os.replace(temporary, folder / f"{FLIGHT_RECORDER}{rank}")
