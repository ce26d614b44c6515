"""The shipped job scripts without Slurm: its commands are stand-ins that say what the test tells them."""

import os
import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((REPOSITORY / "scripts/slurm").glob("pretrain_*.sbatch"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_runs_in_two_folders_do_not_wait(script):
    """Jobs of all runs have the name in the script, so they must not wait for jobs of their name."""
    options = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert any("--job-name" in option for option in options)
    assert not any("singleton" in option for option in options)


@pytest.fixture
def start(tmp_path):
    """Start the script as job 42, while the jobs named are running; return its exit code and what it said."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, body in {
        "scontrol": "echo node1",
        "squeue": 'for job in $RUNNING; do case " $* " in *--jobs=$job*) echo $job;; esac; done',
        "srun": "echo srun started; exit 1",
    }.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)

    def run(*running: str, **settings: str) -> subprocess.CompletedProcess:
        slurm = {"SLURM_JOB_ID": "42", "SLURM_NNODES": "1", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "node1"}
        slurm |= {
            "SLURM_SUBMIT_DIR": str(REPOSITORY),
            "RUN_FOLDER": str(tmp_path / "run"),
            "RUNNING": " ".join(running),
        }
        settings["PATH"] = f"{commands}:{os.environ['PATH']}"
        env = {**os.environ, **slurm, **settings}
        return subprocess.run(["bash", SCRIPTS[0]], env=env, capture_output=True, text=True)

    return run


@pytest.mark.parametrize("last", ["41", "42", None])
def test_a_second_job_of_a_folder_is_refused(start, tmp_path, last):
    logs = tmp_path / "run/logs"
    logs.mkdir(parents=True)
    if last:
        (logs / "running_job").write_text(last)
    done = start("41", "42")
    if last == "41":
        assert done.returncode == 2 and "srun started" not in done.stdout
        assert f"refused: job 41 trains in {tmp_path}/run" in done.stdout
        assert (logs / "running_job").read_text() == "41"
    else:  # this job, started again, or the first one
        assert "refused" not in done.stdout and "srun started" in done.stdout
        assert (logs / "running_job").read_text() == "42\n"


def test_a_folder_whose_job_has_ended_is_free(start, tmp_path):
    (tmp_path / "run/logs").mkdir(parents=True)
    (tmp_path / "run/logs/running_job").write_text("41")
    assert "srun started" in start("42").stdout


@pytest.mark.parametrize(
    "setting",
    [
        *("RESTARTS=-1", "RESTARTS=three", "STUCK_SECONDS=1.5", "GPUS_PER_NODE=all", "KEEP_EVERY=x"),
        *("WHEN_TIME_IS_UP=stop", "PREFLIGHT=no"),
    ],
)
def test_odd_settings_are_refused_by_name(start, tmp_path, setting):
    name, value = setting.split("=")
    done = start(**{name: value})
    assert done.returncode == 2 and f"refused: {setting} is n" in done.stdout and "srun started" not in done.stdout
    assert done.stderr == "" and not (tmp_path / "run").exists()


def test_settings_of_the_site_win_over_the_file():
    file = REPOSITORY / "scripts/slurm/nccl.env"
    names = re.findall(r"^(?:\[.*\|\| )?export (\w+)=", file.read_text(), re.MULTILINE)
    assert {"NCCL_DEBUG", "NCCL_IB_TIMEOUT", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"} <= set(names)
    command = ["bash", "-euc", 'source "$1"; for name in "${@:2}"; do echo "${!name}"; done', "bash", file, *names]
    for site in ({}, dict.fromkeys(names, "site")):
        env = {"PATH": os.environ["PATH"], "LOGS": "/run/my logs", **site}
        printed = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
        values = dict(zip(names, printed, strict=True))
        assert set(values.values()) == {"site"} if site else values["NCCL_IB_TIMEOUT"] == "22"
        assert site or values["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/run/my logs/nccl_trace_rank_"
