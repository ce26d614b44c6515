"""Runs as users start them, with several ranks on one GPU: one is killed and resumed on another layout, one hangs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_blackmamba.runtime.exits import HUNG
from megatron_blackmamba.runtime.parent import follow_parent
from tests.gpu.nccl_cases import LOSSES
from tests.gpu.nccl_faults import DRILL

STEPS, EVERY, KILLED_AT, STOPPED_AT = 10, 2, 5, 3
KILLED = 128 + signal.SIGKILL
SETTINGS = [
    *("data.sequence_length=64", "training.global_batch=8", "training.micro_batch=4", f"training.tokens={STEPS * 512}"),
    *("training.overlap=true", "training.bucket_size=20000", "training.evaluate_every=0", "training.precision=fp32"),
    *(f"checkpoint.every={EVERY}", "logging.tensorboard=false"),
]
FIRST = ["--nproc", "4", "--restarts", "0", "parallel.tensor=2", "parallel.expert=2"]
SECOND = ["--nproc", "2", "parallel.pipeline=2"]
Start = Callable[..., tuple[int, str]]


class OutOfTime(Exception):
    """A drill that the time limit ended, with what its command had printed."""


def starter(folder: Path, environment: Callable[..., dict[str, str]], until: float) -> Start:
    """Return a function that runs `blackmamba train tiny` and returns its exit code and output."""

    def start(name: str, *words: str, drill: str = "") -> tuple[int, str]:
        drilled = {DRILL: drill, "BLACKMAMBA_IMPORT": "tests.gpu.nccl_faults"} if drill else {}
        command = [sys.executable, "-m", "megatron_blackmamba", "train", "tiny", *words, *SETTINGS]
        command += [f"folder={folder}", f"name={name}"]
        with open(folder / f"{name}.log", "a+") as log:
            process = subprocess.Popen(
                command,
                env=environment(**drilled),
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(follow_parent, os.getpid()),
            )
            try:
                code = process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise OutOfTime(_end_of(folder, name)) from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its workers follow it
                process.wait()
        return code, _end_of(folder, name)

    return start


def _end_of(folder: Path, name: str) -> str:
    return (folder / f"{name}.log").read_text(errors="replace")[-3000:]


def _losses(folder: Path, name: str) -> dict[int, float]:
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


def kill_and_resume(folder: Path, start: Start) -> dict[str, Any]:
    """Kill a rank of 4 while it trains and saves, resume on 2 ranks in another layout, and compare with one process."""
    problems = []
    code, said = start("alone")
    if code:
        return {"problems": [f"one process ended with {code}: {said}"]}
    killed = folder / "killed.once"  # by an earlier call, which had no time to resume
    if not killed.exists():
        code, said = start("killed", *FIRST, drill=f"kill:1:{KILLED_AT}")
        if code != KILLED:
            return {"problems": [f"the run whose rank is killed ended with {code}, not {KILLED}: {said}"]}
        killed.touch()
    saved = sorted(path.name for path in (folder / "killed" / "checkpoints").glob("step_*"))
    code, said = start("killed", *SECOND)
    if code:
        return {"problems": [*problems, f"the resumed run ended with {code}: {said}"], "saved": saved}
    one, many = _losses(folder, "alone"), _losses(folder, "killed")
    if sorted(one) != sorted(many) or len(one) != STEPS:
        return {"problems": [*problems, f"steps recorded: {sorted(many)}, by one process {sorted(one)}"]}
    furthest = max(abs(one[step] - many[step]) for step in one)
    if not saved:
        problems.append("no checkpoint was there to resume from")
    if furthest > LOSSES["fp32"]:
        problems.append(f"losses: {furthest:.1e} from one process, {LOSSES['fp32']:.1e} is allowed")
    return {"losses": furthest, "saved": saved, "problems": problems}


def stop(folder: Path, start: Start) -> dict[str, Any]:
    """Let a rank of 2 fall asleep in a step; both must end, and their reports must name it."""
    seconds = ["training.guard.hang_seconds=30"]
    code, said = start("stopped", *FIRST, *seconds, drill=f"stop:1:{STOPPED_AT}")
    reports = {path.stem: path.read_text() for path in (folder / "stopped").glob("logs/hang-*/rank-*.txt")}
    named = [line for text in reports.values() for line in text.splitlines() if line.startswith("rank 1 (")]
    problems = []
    if code != HUNG:
        problems.append(f"ended with {code}, not {HUNG}: {said}")
    if len(reports) != 4:
        problems.append(f"{len(reports)} of 4 ranks left a report")
    if not any("has not arrived at collective" in line for line in named):
        problems.append(f"no report says that rank 1 has not arrived: {list(reports.values())[:1]}")
    return {"reports": len(reports), "named": named[:1], "problems": problems}


DRILLS: dict[str, Callable[[Path, Start], dict[str, Any]]] = {"kill_and_resume": kill_and_resume, "stop": stop}
