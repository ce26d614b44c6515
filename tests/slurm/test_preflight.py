"""The preflight of all ranks together, in real jobs of two nodes."""

import sys

import pytest

from megatron_blackmamba.launch.snapshot import take_snapshot
from megatron_blackmamba.report.overview import overviews
from tests.slurm.cluster import LENIENT
from tests.slurm.conftest import REPOSITORY

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm_jobs")]
SCRIPT = REPOSITORY / "scripts/slurm/pretrain_1.5b.sbatch"


def submit(slurm, tmp_path, options=LENIENT, **env):
    """Submit the shipped script with a small run on two nodes."""
    return slurm.submit(
        *(
            "--nodes=2",
            "--ntasks-per-node=1",
            "--gpus-per-node=1",
            "--cpus-per-task=1",
            "--time=60",
        ),
        *("--signal=B:USR1@60", f"--output={tmp_path}/job.log"),
        *(SCRIPT, "tiny", "parallel.expert=2", "training.stop_after_steps=3"),
        cwd=REPOSITORY,
        RUN_FOLDER=str(tmp_path / "run"),
        **{"PYTHON": sys.executable, "GPUS_PER_NODE": "0", "PREFLIGHT": "all", "DOCTOR_OPTIONS": options, **env},
    )


def test_a_node_with_other_code_is_left_out(slurm, tmp_path):
    take_snapshot(tmp_path / "old")
    with open(tmp_path / "old/megatron_blackmamba/__init__.py", "a") as file:
        file.write("# an older copy\n")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\n[ "$SLURMD_NODENAME" = node2 ] && cd {tmp_path}/old && export PYTHONPATH=$PWD\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    job, log = submit(slurm, tmp_path, PYTHON=str(python)), tmp_path / "job.log"
    shown = slurm.wait(job, log, until=lambda _: log.exists() and "training on 2 nodes" in log.read_text())
    assert (shown["NodeList"], shown["Restarts"]) == ("node[1,3]", "1"), log.read_text()
    assert "unfit: node2: our code is " in log.read_text()


def test_first_node_without_python_is_left_out(slurm, tmp_path):
    """The plan is checked there; it has not refused the run, so another start checks it again."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\n[ "$SLURMD_NODENAME" != node1 ] || exec /nowhere/python\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    job, log = submit(slurm, tmp_path, PYTHON=str(python), PREFLIGHT="nodes"), tmp_path / "job.log"
    shown = slurm.wait(job, log, until=lambda _: log.exists() and "training on 2 nodes" in log.read_text())
    text = log.read_text()
    assert (shown["NodeList"], shown["ExcNodeList"], shown["Restarts"]) == ("node[2-3]", "node1", "1"), text
    assert "the plan could not be checked on node1" in text and "the plan says" not in text
    assert text.count("checking the plan") == 2


def test_small_disk_ends_the_job_without_blame(slurm, tmp_path):
    job, log = submit(slurm, tmp_path, f"{LENIENT} --threshold checkpoints=1e9"), tmp_path / "job.log"
    ended = slurm.wait(job, log)
    assert (ended["JobState"], ended["Restarts"], ended["ExcNodeList"]) == ("FAILED", "0", "(null)"), log.read_text()
    assert "problem: space: " in log.read_text() and "no single node is the cause" in log.read_text()
    (shown,) = overviews(tmp_path / "run")
    assert (shown.state, shown.problem) == ("failed", f"job {job} ended with exit code 1")


def test_later_start_with_healthy_nodes_is_idle(slurm, tmp_path):
    """The first start ends the job, since a wrong setting stays wrong; later ones may meet what passes."""
    too_much = f"{LENIENT} --threshold checkpoints=1e9"
    job, log = submit(slurm, tmp_path, too_much, SLURM_RESTART_COUNT="1"), tmp_path / "job.log"
    shown = slurm.wait(job, log, until=lambda shown: shown["Restarts"] == "1")
    assert shown["ExcNodeList"] == "(null)", log.read_text()
    assert "no single node is the cause" in log.read_text()
    assert len(list((tmp_path / "run/logs").glob("*/idle_start-*"))) == 1
