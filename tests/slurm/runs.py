"""Runs of the tiny model under a test cluster, and the processes that keep them going."""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from megatron_blackmamba.formats.run_folder import RunFolder
from tests.slurm.cluster import Cluster


def losses(run: RunFolder) -> dict[int, float]:
    """Return the loss of every step so far; a step written twice would be a step trained twice."""
    if not run.metrics.exists():
        return {}
    complete = run.metrics.read_text().rpartition("\n")[0].splitlines()
    steps = [json.loads(line) for line in complete]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    return {step["step"]: step["loss"] for step in steps}


def log_of(run: RunFolder, job: str) -> Path:
    return run.logs / f"{job}.log"


def newest(run: RunFolder) -> int:
    return int(run.latest.read_text().strip().removeprefix("step_")) if run.latest.exists() else 0


def tries(run: RunFolder, job: str) -> int:
    """Count how often the ranks have been started."""
    log = log_of(run, job)
    return log.read_text().count("training on 2 nodes") if log.exists() else 0


def ranks(slurm: Cluster, job: str, rank: int | None = None) -> list[int]:
    """Return the process ids of the training step's ranks."""
    wanted = {"SLURM_JOB_ID": job, "SLURM_STEP_NUM_TASKS": "2"} | ({} if rank is None else {"SLURM_PROCID": str(rank)})
    trained = [pid for pid in slurm.processes(**wanted) if " train " in command(pid)]
    return [pid for pid in trained if parent(pid) not in trained]


def writers(slurm: Cluster, job: str) -> list[int]:
    """Return the process ids of the ranks' children: checkpoint writers while a save is under way."""
    found = []
    for children in (file for pid in ranks(slurm, job) for file in Path(f"/proc/{pid}/task").glob("*/children")):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in children.read_text().split()]
    return [pid for pid in found if "deadman" not in command(pid)]


def launchers(slurm: Cluster, job: str) -> list[int]:
    """Return the process ids of the srun that runs the training step."""
    return [
        pid
        for pid in slurm.processes(SLURM_JOB_ID=job)
        if command(pid).startswith("srun ") and " train " in command(pid) and "--kill-on-bad-exit=1" in command(pid)
    ]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def kill(pids: list[int], number: signal.Signals = signal.SIGKILL) -> int:
    """Send processes a signal; return how many were still there."""
    reached = 0
    for pid in pids:
        try:
            os.kill(pid, number)
            reached += 1
        except ProcessLookupError:
            pass
    return reached


def train_alone(slurm: Cluster, folder: Path, *config: str) -> dict[int, float]:
    """Return the losses of the same run on two processes of this machine, left alone."""
    command = [sys.executable, "-m", "megatron_blackmamba", "train", "tiny", *config]
    slurm.run(*command, f"folder={folder}", "name=alone", "--nproc", "2")
    return losses(RunFolder(folder / "alone"))
