"""The state of a run, by its markers, lock, events and jobs; a killed run leaves none of the first three."""

import os
import re
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron_blackmamba.formats import events
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.formats.step_records import records_in
from megatron_blackmamba.report.history import launched
from megatron_blackmamba.runtime.slurm import squeue
from megatron_blackmamba.training.keep.lock import is_held

TAIL = 1 << 18
"""Bytes at the end of metrics.jsonl, or events.jsonl, in which the last records lie."""
SILENT_STEPS = 20
"""A run is silent if it has written no record in the time of this many steps."""
SILENT_SECONDS = 120.0
SUBMITTING_SECONDS = 60.0
"""The time in which a launch hands its jobs to Slurm."""
STARTS = (events.Started.kind, events.Branched.kind, events.Resumed.kind)
ENDS = {
    events.Done.kind: "finished",
    events.Stopped.kind: "stopped",
    events.GaveUp.kind: "gave up",
    events.Failed.kind: "failed",
}
JOB_NAME = re.compile(r'^#SBATCH --job-name="?([^"\n]+)', re.MULTILINE)


@dataclass(frozen=True)
class State:
    """The state of a run, and what is wrong with it."""

    name: str
    """launched, not started, training, finished, requeue (its job goes on), stopped, gave up or failed."""
    problem: str | None = None


class Queue:
    """The names of all jobs in Slurm's queue, asked for once, and only if a run needs them."""

    @cached_property
    def names(self) -> frozenset[str] | None:
        """Return the names; None where Slurm does not answer."""
        lines = squeue("--format=%j")
        return None if lines is None else frozenset(lines)


def state_of(run: RunFolder, step_seconds: float, queue: Queue) -> State:
    """Return the state of a run.

    step_seconds: Time of its last step.
    """
    if run.done.exists():
        return State("finished")
    held = is_held(run.lock)
    if held:
        return State("training", _unrecorded(run, step_seconds))
    if run.failed.exists():
        return State("failed", run.failed.read_text("utf-8", "replace").strip() or "its last job failed")
    if run.requeue.exists():  # only a job goes on by itself
        return State("requeue" if (run.logs / "running_job").exists() else "stopped")
    if launched(run) and not run.metrics.exists():
        return _before_training(run, queue)
    kinds = [event["kind"] for event in records_in(run.events, events.parse_line, TAIL)]
    last = next((kind for kind in reversed(kinds) if kind in STARTS or kind in ENDS), None)
    if last in ENDS:
        return State(ENDS[last])
    if not run.metrics.exists():
        return State("not started" if last is None else "stopped" if held is False else "training")
    trains = held is None and not _is_silent(_age(run.metrics), step_seconds)
    return State("training", _unrecorded(run, step_seconds)) if trains else State("stopped")


def _before_training(run: RunFolder, queue: Queue) -> State:
    """Return the state of a launched run that has not begun: its job waits, starts, or has left the queue."""
    jobs = sorted(run.launches.glob("*/job.sbatch"))
    names = {name for job in jobs for name in JOB_NAME.findall(job.read_text("utf-8", "replace"))}
    sees_all_jobs = os.getuid() in (0, run.root.stat().st_uid)  # a site may hide those of other users
    submitting = _age(jobs[-1]) < SUBMITTING_SECONDS
    if submitting or not names or not sees_all_jobs or queue.names is None or names & queue.names:
        return State("launched")
    logs = sorted(run.logs.glob("[0-9]*.log"), key=lambda log: log.stat().st_mtime)
    if logs:
        return State("failed", f"its last job ended before the first step: {logs[-1]}")
    return State("stopped", "its job left the queue before it began: launch it again")


def _unrecorded(run: RunFolder, step_seconds: float) -> str | None:
    """Say what keeps a run that trains from recording its steps, if anything does."""
    if any(run.waiting()):
        return "records cannot be written: is the disk full? They wait in memory"
    if not run.metrics.exists():
        return None
    age = min(_age(run.metrics), _age(run.lock))
    return f"no step recorded for {age / 60:.0f} min" if _is_silent(age, step_seconds) else None


def _is_silent(age: float, step_seconds: float) -> bool:
    return age > max(SILENT_SECONDS, SILENT_STEPS * step_seconds)


def _age(path: Path) -> float:
    """Return the seconds since a file was written."""
    return time.time() - path.stat().st_mtime if path.exists() else float("inf")
