"""The Slurm jobs of a cleaning, recorded in its output folder: nothing else may work there until they have ended."""

import os
import subprocess
from pathlib import Path

from megatron_blackmamba.data_tools.rejects import InputError

JOBS = "slurm_jobs"
_NEVER = "DependencyNeverSatisfied"
"""The reason of a pending job whose predecessor failed."""


def record_job(path: Path, output: str) -> str:
    """Return the job id that sbatch printed, after adding it to the file at `path`."""
    job = output.split()[-1]
    with open(path, "a") as file:
        file.write(f"{job}\n")
        file.flush()
        os.fsync(file.fileno())
    return job


def refuse_unfinished_jobs(work: Path) -> None:
    """Refuse a folder in which Slurm jobs run or wait; forget those that have ended, however they did."""
    path = work / JOBS
    jobs = path.read_text().split() if path.exists() else []
    if not jobs:
        return
    queued = _queued(path, jobs)
    waiting = [job for job in dict.fromkeys(jobs) if job in queued]
    if waiting:
        raise InputError(
            f"{work.parent}: Slurm jobs {', '.join(waiting)} work in this folder. Let them finish, or end them with: "
            f"scancel {' '.join(waiting)}"
        )
    path.unlink()


def _queued(path: Path, jobs: list[str]) -> set[str]:
    """Return the ids of all jobs that run or can still start; the tasks of an array have one id."""
    command = ["squeue", "--noheader", "--all", "--format=%F %r"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or error
        raise InputError(
            f"{path}: lists Slurm jobs {', '.join(jobs)}, and squeue cannot tell whether they have ended "
            f"({str(detail).strip()}). Run this where squeue works, or remove the file once they have"
        ) from None
    rows = (line.split(maxsplit=1) for line in listed.splitlines() if line.strip())
    return {job for job, *reason in rows if _NEVER not in reason}
