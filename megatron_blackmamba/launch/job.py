"""The Slurm job of a run, as text: what it asks for, and where its code and config lie."""

import hashlib
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from megatron_blackmamba.console.units import duration
from megatron_blackmamba.evaluation.tasks import PAPER, find_files
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.runtime.exits import RESTARTS

LONGEST_WARNING_S = 600
MOST_WARNING_S = 65535
LONGEST_NAME = 60
IMAGE_FILES = (".sif", ".sqsh")
"""The ends of the names of images that are files; the others are names in a registry."""
EVALUATE_JOB = "evaluate.sbatch"
"""The job that scores a checkpoint, beside the config of a launch."""
EVALUATE_TIME = "4:00:00"
"""The most that such a job asks for: a short limit lets it start between larger jobs."""
EVALUATE_NICE = 10_000
"""How far such a job stands behind the training in the queue; `--sbatch=--nice=N` changes it for both."""
SETTINGS = ("PREFLIGHT", "PREFLIGHT_SECONDS", "DOCTOR_OPTIONS", "STUCK_SECONDS", "WATCH_SECONDS")
"""Variables of the job body; those set at launch are written into the job."""
PREFLIGHT_S = 600
"""The two checks before training have 300 s each."""
SHORT_WARNING_S = 60


OWN_OPTIONS = {
    "job-name": "name=...",
    "nodes": "--nodes",
    "gpus-per-node": "--gpus-per-node",
    "gpus": "--gpus-per-node",
    "gpus-per-task": "--gpus-per-node",
    "gpus-per-socket": "--gpus-per-node",
    "ntasks": "--gpus-per-node",
    "ntasks-per-node": "--gpus-per-node",
    "cpus-per-task": "--cpus-per-process",
    "time": "--time",
    "signal": "--warn",
    "partition": "--partition",
    "account": "--account",
    "dependency": "--chain",
    "array": "--chain",
    "requeue": "--chain",
    "no-requeue": "--chain",
    "output": "folder=...",
    "open-mode": "folder=...",
}
"""Options of sbatch that a job sets itself, and what changes each."""
SHORT_OPTIONS = {
    "-J": "job-name",
    "-N": "nodes",
    "-G": "gpus",
    "-n": "ntasks",
    "-c": "cpus-per-task",
    "-t": "time",
    "-p": "partition",
    "-A": "account",
    "-a": "array",
    "-d": "dependency",
    "-o": "output",
}


class LaunchError(ValueError):
    """A job that cannot be submitted; the message says why and what to do."""


@dataclass(frozen=True)
class JobRequest:
    """The resources that a job requests from the cluster, and the options of `blackmamba launch`."""

    nodes: Annotated[int, typer.Option(help="Number of nodes.")]
    gpus_per_node: Annotated[
        str, typer.Option(metavar="[TYPE:]N", help="GPUs per node, one process each; 0 trains on CPUs.")
    ] = "8"
    gpu: Annotated[str, typer.Option(help="GPU type: h100, h200, a100, a100-40gb, or a YAML file.")] = "h100"
    """The GPU of the plan that checks the memory."""
    processes_per_node: Annotated[int | None, typer.Option(help="Processes per node, only with --gpus-per-node 0.")] = (
        None
    )
    cpus_per_process: Annotated[int, typer.Option(help="Number of cores per process.")] = 8
    time: Annotated[str, typer.Option(help="Slurm time limit: 90 (minutes), 4:00:00, 2-12.")] = "24:00:00"
    warn_seconds: Annotated[
        int | None,
        typer.Option("--warn", help="Save this many seconds before the limit.", show_default="time / 4, at most 600"),
    ] = None
    partition: Annotated[str | None, typer.Option(help="Slurm partition.", envvar="SBATCH_PARTITION")] = None
    account: Annotated[str | None, typer.Option(help="Slurm account.", envvar="SBATCH_ACCOUNT")] = None
    container: Annotated[str | None, typer.Option(help="Container image: .sif for apptainer, else for pyxis.")] = None
    chain: Annotated[int, typer.Option(help="Number of jobs in a chain; a single job requeues itself.")] = 1
    restarts: Annotated[
        int, typer.Option(min=0, help="Restarts inside the job after a crash or hang between two checkpoints.")
    ] = RESTARTS
    evaluate: Annotated[
        Path | None,
        typer.Option(metavar="DIR", resolve_path=True, help="Score kept checkpoints in separate jobs, on data in DIR."),
    ] = None
    options: Annotated[
        tuple[str, ...],
        typer.Option("--sbatch", metavar="OPTION", help="Extra sbatch option, for example --qos=high; repeatable."),
    ] = ()
    mounts: tuple[str, ...] = ()
    """Folders and files that the container mounts beside code and run, as /data or /data:/inside."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Variables of the job body, from SETTINGS."""

    def __post_init__(self) -> None:
        for name in ("nodes", "cpus_per_process", "chain"):
            if getattr(self, name) < 1:
                raise LaunchError(f"{name.replace('_', '-')} is at least 1, not {getattr(self, name)}")
        if self.evaluate is not None and not self.evaluate.is_dir():
            raise LaunchError(f"--evaluate {self.evaluate}: no such folder. Name one with a data file for each task")
        missing = [task for task, file in find_files(PAPER, self.evaluate).items() if self.evaluate and not file]
        if missing:
            names = ", ".join(missing)
            raise LaunchError(f"--evaluate {self.evaluate}: no file for {names}. Put TASK.jsonl or TASK.parquet there")
        if self.evaluate is not None and self.container:
            raise LaunchError("--evaluate does not run in a container: leave out --container, or use evaluate --watch")
        if self.container and self.container.endswith(IMAGE_FILES) and not Path(self.container).is_file():
            raise LaunchError(f"--container {self.container}: no such file. Build it with scripts/container/Dockerfile")
        if self.restarts < 0:
            raise LaunchError(f"--restarts must be 0 or more, not {self.restarts}")
        if (self.processes_per_node or 1) < 1:
            raise LaunchError(f"--processes-per-node must be 1 or more, not {self.processes_per_node}")
        if self.gpus and self.processes_per_node not in (None, self.gpus):
            raise LaunchError("--processes-per-node needs --gpus-per-node 0: a GPU has one process")
        if not time_limit_s(self.time):
            raise LaunchError(f'--time {self.time} means "unlimited" to Slurm. Give a limit, such as --time 24:00:00')
        if self.warn_seconds is not None and not 1 <= self.warn_seconds <= MOST_WARNING_S:
            raise LaunchError(f"--warn must be 1 to {MOST_WARNING_S} seconds for Slurm, not {self.warn_seconds}")
        wrong = next((option for option in self.options if not option.startswith("-")), None)
        if wrong is not None:
            raise LaunchError(f"sbatch options begin with --, for example --qos=high; {wrong!r} does not")
        for option in self.options:
            name = SHORT_OPTIONS.get(option[:2], "") or re.split(r"[=\s]", option.removeprefix("--"))[0]
            if name == "gres" and re.search(r"[=\s,]gpu\b", option):
                raise LaunchError(f"--sbatch={option}: use --gpus-per-node instead, with a type as in h100:8")
            if name in OWN_OPTIONS:
                raise LaunchError(f"--sbatch={option}: the job sets --{name} itself. Use {OWN_OPTIONS[name]} instead")
        if self.warning_s >= time_limit_s(self.time):
            raise LaunchError(f"--warn: {self.warning_s} s before the end of --time {self.time} is before the start")

    @property
    def gpus(self) -> int:
        """Return the number of GPUs per node."""
        return self._gpus[1]

    def asking(self, gpus: int) -> str:
        """Return the sbatch option for this many GPUs of a node, empty for none."""
        return f"--gpus-per-node={self._gpus[0]}{gpus}" if gpus else ""

    @property
    def _gpus(self) -> tuple[str, int]:
        """Return what comes before the number of GPUs, as `h100:`, and the number."""
        match = re.fullmatch(r"([\w.-]+:)?(\d+)", self.gpus_per_node.strip())
        if not match:
            raise LaunchError(
                f"GPUs per node are a number or a type and a number, as in h100:8; {self.gpus_per_node!r} is neither"
            )
        return match[1] or "", int(match[2])

    @property
    def python(self) -> str:
        """Return this Python, or the default one if the job runs in a container image."""
        return "python3" if self.container else sys.executable

    @property
    def tasks_per_node(self) -> int:
        return self.gpus or self.processes_per_node or 1

    @property
    def warning_s(self) -> int:
        return self.warn_seconds or min(LONGEST_WARNING_S, time_limit_s(self.time) // 4)

    @property
    def limit(self) -> str:
        """Return the time limit in words, and when the run is asked to save."""
        return f"{duration(time_limit_s(self.time))}; the run is asked to save {duration(self.warning_s)} before it"

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what is probably not meant, although Slurm takes it."""
        found, seconds = [], time_limit_s(self.time)
        if re.fullmatch(r"\d+:\d+", self.time.strip()):
            found.append(f"--time {self.time} is {duration(seconds)} to Slurm; for hours, write {self.time}:00")
        elif seconds < PREFLIGHT_S:
            found.append(f"--time {self.time} is {duration(seconds)}; the preflight alone may take {PREFLIGHT_S} s")
        if self.warn_seconds and self.warn_seconds < SHORT_WARNING_S:
            found.append(f"--warn {self.warn_seconds}: a step and a save must fit into {self.warn_seconds} s")
        return tuple(found)


def time_limit_s(text: str) -> int:
    """Parse a Slurm time into seconds: `90`, `1:30`, `24:00:00`, `2-12`, `2-12:00`, `2-12:00:00`."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not match:
        raise LaunchError(f"time is minutes, H:M:S or D-H:M:S; {text!r} is none of them")
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:
        hours, minutes, seconds = (numbers + [0, 0])[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, minutes, seconds = 0, *(numbers + [0])[:2]
    if max(minutes if days or len(numbers) == 3 else 0, seconds) > 59:
        raise LaunchError(f"time {text!r}: minutes and seconds after a colon are at most 59")
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def render(request: JobRequest, run: RunFolder, code: Path, config: Path, keep_every: int = 0) -> str:
    """Return the sbatch file: Slurm's options, the parameters of the job, and the shared job body."""
    wishes = [
        f"--job-name={job_name(run)}",
        f"--nodes={request.nodes}",
        f"--ntasks-per-node={request.tasks_per_node}",
        *("--mem=0", "--exclusive", "--requeue", "--dependency=singleton", "--open-mode=append"),
        f"--time={request.time}",
        f"--signal=B:USR1@{request.warning_s}",
        *_shared(request, run, request.gpus, "%j.log"),
    ]
    variables = {
        "CODE": code,
        "PYTHON": request.python,
        "RUN_FOLDER": run.root,
        "GPUS_PER_NODE": request.gpus,
        "GPU": request.gpu,
        "RESTARTS": request.restarts,
        "WHEN_TIME_IS_UP": "exit" if request.chain > 1 else "requeue",
        "CONTAINER": request.container or "",
    }
    variables |= request.settings
    if request.container:
        variables["CONTAINER_MOUNTS"] = ",".join(request.mounts)
    if request.evaluate is not None:
        variables |= {"EVALUATE_JOB": config.with_name(EVALUATE_JOB), "KEEP_EVERY": keep_every}
    if wrong := next((text for text in (*wishes, *map(str, variables.values())) if re.search(r"[\n\r\\]", text)), None):
        raise LaunchError(f"{wrong!r}: Slurm allows neither backslashes nor line feeds. Choose other names")
    said = [
        f"# Training of {run.root.name}, written by `blackmamba launch`. Jobs of one run wait for each other.",
        "# CODE is a copy made at launch; its scripts/slurm/train_job.sh is what the job does. PYTHON is no copy.",
    ]
    lines = [
        *(["# PYTHON is the interpreter in the image, not the one that launched."] if request.container else []),
        *(f"{name}={shlex.quote(str(value))}" for name, value in variables.items()),
        f"CONFIG=({shlex.quote(str(config))})",
        "",
        'source "$CODE/scripts/slurm/train_job.sh"',
    ]
    return _script(said, wishes, lines)


def render_evaluation(request: JobRequest, run: RunFolder, code: Path) -> str:
    """Return the sbatch file that scores the checkpoint given as its argument, on one GPU or on CPUs."""
    wishes = [
        f"--job-name={job_name(run)}-evaluate",
        *("--nodes=1", "--ntasks=1"),
        f"--time={min(request.time, EVALUATE_TIME, key=time_limit_s)}",
        f"--nice={EVALUATE_NICE}",
        *_shared(request, run, min(1, request.gpus), "evaluate-%j.log"),
    ]
    command = [request.python, "-m", "megatron_blackmamba", "evaluate"]
    options = ["--data", str(request.evaluate), "--encoding", "separate"]
    said = [
        f"# Scores a checkpoint of {run.root.name}; written by `blackmamba launch`. If it did not end in time,",
        "# sbatch FILE CHECKPOINT continues it.",
    ]
    lines = [
        f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}",
        f'exec {shlex.join(command)} "$1" {shlex.join(options)}',
    ]
    return _script(said, wishes, lines)


def _shared(request: JobRequest, run: RunFolder, gpus: int, log: str) -> list[str]:
    """Return the options of sbatch that training and evaluation have alike; the user's own come last."""
    return [
        request.asking(gpus),
        f"--cpus-per-task={request.cpus_per_process}",
        f"--output={_literal(run.logs)}/{log}",
        f"--partition={request.partition}" if request.partition else "",
        f"--account={request.account}" if request.account else "",
        *request.options,
    ]


def _script(said: list[str], wishes: list[str], lines: list[str]) -> str:
    asked = [f"#SBATCH {_quoted(wish)}" for wish in wishes if wish]
    return "\n".join(["#!/bin/bash", *said, *asked, "", *lines, ""])


def job_name(run: RunFolder) -> str:
    """Name the run and a hash of its folder: --dependency=singleton makes jobs of one name wait for each other."""
    plain = re.sub(r"[^\w.+-]", "_", run.root.name, flags=re.ASCII)[:LONGEST_NAME]
    return f"{plain}-{hashlib.sha256(str(run.root).encode()).hexdigest()[:8]}"


def _quoted(option: str) -> str:
    """Quote a value for sbatch: outside quotes a # ends the line, inside them a backslash escapes a quote."""
    name, equals, value = option.partition("=")
    if not equals or re.fullmatch(r"[\w%@+=:,./^-]*", value, re.ASCII):
        return option
    escaped = value.replace('"', '\\"')
    return f'{name}="{escaped}"'


def _literal(path: Path) -> str:
    """Return a path in which Slurm expands nothing."""
    return str(path).replace("%", "%%")
