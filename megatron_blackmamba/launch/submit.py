"""From a config to jobs in the queue: snapshot, script, sbatch."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_blackmamba.config import RunConfig, from_saved, to_saved, to_yaml
from megatron_blackmamba.config.load import resolve_paths
from megatron_blackmamba.formats import branches
from megatron_blackmamba.formats.atomic import write_text
from megatron_blackmamba.formats.mixture import Mixture, MixtureError
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.launch.job import (
    EVALUATE_JOB,
    SETTINGS,
    JobRequest,
    LaunchError,
    job_name,
    render,
    render_evaluation,
)
from megatron_blackmamba.launch.snapshot import home, take_snapshot
from megatron_blackmamba.plan import gpus
from megatron_blackmamba.plan.estimate import Asked, make_plan
from megatron_blackmamba.plan.stages import Beginning
from megatron_blackmamba.plan.table import refusal, verdict, warnings
from megatron_blackmamba.runtime.slurm import squeue

MIXTURE_FILE = "mixture.yaml"
"""The mixture of a launch as it was, beside its config."""
NO_CONTROLLER = re.compile("contact slurm controller|connect failure|configuration source", re.IGNORECASE)
"""What sbatch says where Slurm's programs are installed but its controller does not answer."""
GPU_FILE = "gpu.yaml"
"""The description given with --gpu, as it was at launch."""


@dataclass(frozen=True)
class Launch:
    """A launch on disk and in the queue."""

    run: RunFolder
    folder: Path
    """Code, config and job as submitted."""
    script: str
    limit: str
    """The time limit in words."""
    missing_data: str | None = None
    """Why training could not read its data, if so."""
    warnings: tuple[str, ...] = ()
    """What is probably not meant, although the job can run."""
    verdict: str = ""
    """Memory and time by the plan; empty for a run without GPUs."""
    jobs: tuple[str, ...] = ()
    waits_for: tuple[str, ...] = ()
    """Jobs of the same run that were in the queue before."""
    begins: Beginning = field(default_factory=Beginning)

    def to_json(self) -> dict[str, Any]:
        names = ("jobs", "waits_for", "script", "limit", "missing_data", "warnings", "verdict")
        return {"run": str(self.run.root), "folder": str(self.folder), **{name: getattr(self, name) for name in names}}


def prepare(config: RunConfig, request: JobRequest) -> Launch:
    """Return what would be submitted, without side effects; raise LaunchError if it cannot work or fit."""
    run = RunFolder(Path(config.folder).resolve() / config.name)
    if run.done.exists():
        raise LaunchError(f"{run.root} is complete: use another run name (name=...)")
    from megatron_blackmamba.model import lookahead  # these import megatron-core
    from megatron_blackmamba.training.start import headline, resume

    resume.refuse_start(config)
    resume.refuse_continuation(config)
    asked = Asked(request.nodes, request.tasks_per_node, gpus.find(request.gpu), gpu_option=request.gpu)
    begins = Beginning()
    if config.start.branch:
        from megatron_blackmamba.training.branch import beginning  # imports megatron-core

        begins = beginning(config)
    plan = make_plan(config, asked, begins)
    trouble = plan.placed and refusal(plan.placed)
    if trouble:
        raise LaunchError(trouble)
    if plan.refused_data:
        raise LaunchError(plan.refused_data)
    taken = [int(entry.name) for entry in run.launches.glob("[0-9]*") if entry.name.isdecimal()]
    folder = run.launches / f"{max(taken, default=0) + 1:03d}"
    if request.container:
        request = _in_container(config, request, run)
    if Path(request.gpu).is_file() and request.gpu.lower() not in gpus.KNOWN:
        request = replace(request, gpu=str(folder / GPU_FILE))
    request = replace(request, settings={name: os.environ[name] for name in SETTINGS if os.environ.get(name)})
    script = render(request, run, folder / "code", folder / "config.yaml", config.checkpoint.keep_every)
    synthetic = [headline.SYNTHETIC] if config.data.kind == "synthetic" else []
    said = (*request.warnings, *synthetic, *warnings(plan), *lookahead.refuse(config))
    found = verdict(plan) if request.gpus else ""
    return Launch(run, folder, script, request.limit, plan.missing_data, said, found, begins=begins)


def _in_container(config: RunConfig, request: JobRequest, run: RunFolder) -> JobRequest:
    """Return the request with the mounts of the run's data, after those of CONTAINER_MOUNTS."""
    image = str(request.container)
    read = _read_by(config)
    if odd := next((path for path in (run.root, *read) if re.search("[,:]", str(path))), None):
        raise LaunchError(f"{odd}: a container mounts nothing with a comma or colon in its name. Rename it")
    given = [mount for mount in os.environ.get("CONTAINER_MOUNTS", "").split(",") if mount]
    mounted = [Path(mount.split(":")[0]) for mount in given]
    more = [f"{path}:{path}" for path in read if not any(path.is_relative_to(folder) for folder in mounted)]
    image = str(Path(image).resolve()) if Path(image).is_file() else image
    return replace(request, container=image, mounts=(*given, *more))


def _read_by(config: RunConfig) -> list[Path]:
    """Return the folders outside the run's that it reads, if they are there.

    They are those of shards, initial weights, its trunk and the questions that it is scored on.
    """
    mixture = config.data.mixture if config.data.kind == "mixture" else None
    questions = config.evaluation.data if config.evaluation.every else None
    read = [config.start.from_, config.start.branch and branches.split(config.start.branch)[0], questions]
    paths = [Path(path).resolve() for path in read if path and Path(path).exists()]
    with contextlib.suppress(MixtureError):  # the plan has reported it
        return [*paths, *(Mixture.read(mixture).folders() if mixture else [])]
    return paths


def submit(config: RunConfig, request: JobRequest) -> Launch:
    """Write code, config and job into the run folder and hand the job to Slurm, `chain` times."""
    if not shutil.which("sbatch"):
        raise LaunchError("no sbatch here: launch from a login node of the cluster, or look at the job with --dry-run")
    launch = prepare(config, request)
    if launch.missing_data:
        raise LaunchError(launch.missing_data)
    launch.folder.mkdir(parents=True)
    try:
        script = _write(config, request, launch)
    except BaseException:  # a full disk, Ctrl-C
        _take_back(launch)
        raise
    before, jobs = squeue("--me", f"--name={job_name(launch.run)}", "--format=%A") or (), list[str]()
    try:
        for _ in range(request.chain):
            jobs.append(_sbatch(script))
    except LaunchError as error:
        queued = f"\nIn the queue already: {', '.join(jobs)} (scancel {' '.join(jobs)} takes them back)" if jobs else ""
        if not jobs:
            _take_back(launch)
        raise LaunchError(f"{error}{queued}") from None
    return replace(launch, jobs=tuple(jobs), waits_for=tuple(before))


def _write(config: RunConfig, request: JobRequest, launch: Launch) -> Path:
    """Write code, config and job, and return the job's file."""
    launch.run.logs.mkdir(exist_ok=True)
    take_snapshot(launch.folder / "code")
    config = _at_its_checkpoint(config, launch)
    write_text(
        launch.folder / "config.yaml", to_yaml(_with_copied_mixture(_with_absolute_paths(config), launch.folder))
    )
    if str(launch.folder / GPU_FILE) in launch.script:
        shutil.copyfile(request.gpu, launch.folder / GPU_FILE)
    if request.evaluate is not None:
        write_text(launch.folder / EVALUATE_JOB, render_evaluation(request, launch.run, launch.folder / "code"))
    script = launch.folder / "job.sbatch"
    write_text(script, launch.script)
    return script


def _take_back(launch: Launch) -> None:
    """Remove a launch that was not submitted, and the run's folder if there is nothing else in it."""
    shutil.rmtree(launch.folder)
    if launch.begins.trunk:
        branches.release(launch.begins.trunk, launch.run)
    for folder in (launch.run.logs, launch.run.launches, launch.run.root):
        with contextlib.suppress(OSError):
            folder.rmdir()


def announce(launch: Launch) -> str:
    """Return the message for the user after submitting."""
    first, logs = launch.jobs[0], launch.run.logs
    jobs = f"job {first}" if len(launch.jobs) == 1 else f"jobs {', '.join(launch.jobs)}, one after the other"
    before = " ".join(launch.waits_for)
    waits = f"  waits for job {', '.join(launch.waits_for)}; to continue with this one  scancel {before}"
    return "\n".join(
        [
            f"Submitted {jobs}: {launch.run.root}",
            *([waits] if before else []),
            *([f"  plan                          {launch.verdict}"] if launch.verdict else []),
            f"  time limit                    {launch.limit}",
            f"  code and config as launched   {launch.folder}",
            f"  follow the job                tail -F {shlex.quote(f'{logs}/{first}.log')}",
            f"  follow rank 0                 tail -F {shlex.quote(f'{logs}/{first}/rank-0.log')}",
            f"  save and queue again          scancel --batch --signal=USR1 {first}",
            f"  stop                          scancel {' '.join(launch.jobs)}  (saves if that fits into KillWait)",
            f"  export when it is complete    {export_command(launch)} OUT",
        ]
    )


def export_command(launch: Launch) -> str:
    """Return the command that queues an export after the last job; the output folder must be appended."""
    code = launch.folder / "code"
    variables = [f"{name}={shlex.quote(str(value))}" for name, value in (("CODE", code), ("PYTHON", sys.executable))]
    options = [f"--dependency=afterok:{launch.jobs[-1]}", "--kill-on-invalid-dep=yes"]
    script = [str(code / "scripts/slurm/convert.sbatch"), "hf", str(launch.run.root)]
    return " ".join([*variables, "sbatch", *options, shlex.join(script)])


def job_body() -> Path:
    """Return the script that a job runs, of this checkout or installation; a launch copies it."""
    return home("scripts") / "slurm/train_job.sh"


def _sbatch(script: Path) -> str:
    # Launched from inside another job, this one must not inherit that one's size.
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_")) or k == "SLURM_CONF"
    }
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, env=clean)
    if done.returncode:
        advice = "\nNo Slurm controller answers here: launch from a login node of the cluster, or use --dry-run"
        unreachable = NO_CONTROLLER.search(done.stderr)
        raise LaunchError(
            f"Slurm refused the job (--dry-run prints it):\n{done.stderr.strip()}{advice if unreachable else ''}"
        )
    return done.stdout.strip().partition(";")[0]


def _at_its_checkpoint(config: RunConfig, launch: Launch) -> RunConfig:
    """Have a branch begin at the checkpoint of its plan, which the trunk keeps while the job waits in the queue."""
    trunk, step = launch.begins.trunk, launch.begins.step
    if trunk is None:
        return config
    branches.protect(trunk, step, launch.run)
    start = config.start.model_copy(update={"branch": branches.place_of(trunk, step)})
    return config.model_copy(update={"start": start})


def _with_copied_mixture(config: RunConfig, folder: Path) -> RunConfig:
    """Copy the mixture of a run into `folder`, without variables and relative paths, and have the run read the copy."""
    if config.data.kind != "mixture" or not config.data.mixture:
        return config
    origin, copy = config.data.mixture, folder / MIXTURE_FILE
    note = f"# {origin} at launch. To change the mixture of the run, change that file and launch again.\n"
    write_text(copy, note + Mixture.read(origin).independent().to_yaml())
    return config.model_copy(update={"data": config.data.model_copy(update={"mixture": str(copy)})})


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """Make the paths of the run and of what it reads absolute: the job may start in another folder."""
    saved = to_saved(config) | {"folder": str(Path(config.folder).resolve())}
    resolve_paths(saved, Path())
    return from_saved(saved, config.name)
