"""Several machines without Slurm: the commands of scripts/kubernetes and scripts/skypilot, run here as two machines."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_blackmamba.runtime.exits import BAD_INPUT, STOPPED_ON_REQUEST
from megatron_blackmamba.runtime.ports import free_port
from tests.thorough import thorough
from tests.training.runs import SMALL, losses
from tests.waiting import Command, wait_until

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
JOBSET = yaml.safe_load((SCRIPTS / "kubernetes/pretrain_1.5b.yaml").read_text())
JOB = JOBSET["spec"]["replicatedJobs"][0]["template"]["spec"]
(CONTAINER,) = JOB["template"]["spec"]["containers"]
TASK = yaml.safe_load((SCRIPTS / "skypilot/pretrain_1.5b.yaml").read_text())
HERE = [*SMALL, "data.kind=synthetic", "name=run", "parallel.expert=2"]


def commands(platform, folder):
    """Return the shell command of a platform with a small model, two machines of two processes, and no GPU."""
    if platform == "kubernetes":
        text = CONTAINER["command"][-1].replace(f"/{JOB['completions']}", "/2")
        places = [{"JOB_COMPLETION_INDEX": str(number), "MASTER_ADDR": "localhost"} for number in (0, 1)]
    else:
        text = TASK["run"]
        nodes = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_NODES": "2"}
        places = [{"SKYPILOT_NODE_RANK": str(number), **nodes} for number in (0, 1)]
    changes = {
        "--gpus 8": "--gpus 0",
        "--nproc 8": "--nproc 2",
        "blackmamba_1.5b": " ".join(["tiny", *HERE]),
        "data.mixture=/shared/mixture.yaml": "",
        "/shared/runs": str(folder),
    }
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text, places


class Machines:
    """Two machines that run a platform's command."""

    def __init__(self, platform, folder):
        text, places = commands(platform, folder)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        common = {**os.environ, "PATH": path, "MASTER_PORT": str(free_port())}
        folder.mkdir(exist_ok=True)
        self.logs = [folder / f"machine_{number}.txt" for number in (0, 1)]
        self.processes = []
        for place, log in zip(places, self.logs, strict=True):
            with open(log, "w") as output:
                shell = subprocess.Popen(
                    ["bash", "-c", text], env=common | place, stdout=output, stderr=subprocess.STDOUT, cwd=folder
                )
            self.processes.append(shell)

    def output(self):
        return "\n".join(log.read_text() for log in self.logs)

    def ends(self):
        return [process.wait(timeout=900) for process in self.processes]

    def workers(self, number):
        """Return the ranks of a machine, whose command has replaced its shell."""
        children = Path(f"/proc/{self.processes[number].pid}/task/{self.processes[number].pid}/children")
        return [int(pid) for pid in children.read_text().split()]


@thorough
@pytest.mark.parametrize("platform", ["kubernetes", "skypilot"])
def test_two_machines_train_as_one(platform, tmp_path):
    machines = Machines(platform, tmp_path / "two")
    assert machines.ends() == [0, 0], machines.output()
    one = [
        sys.executable,
        "-m",
        "megatron_blackmamba",
        "train",
        "tiny",
        *HERE,
        f"folder={tmp_path}/one",
        "--nproc",
        "4",
    ]
    subprocess.run(one, check=True, capture_output=True)
    assert losses(tmp_path / "two") == losses(tmp_path / "one")


@thorough
@pytest.mark.parametrize("how", ["evicted", "killed"])
def test_machines_that_end_go_on_together(how, tmp_path):
    folder = tmp_path / "cut"
    machines = Machines("kubernetes", folder)
    job = Command(machines.processes[1], machines.output)
    wait_until(lambda: (folder / "run/metrics.jsonl").exists() and len(losses(folder)) > 11, job)
    if how == "evicted":
        machines.processes[1].send_signal(signal.SIGTERM)
        assert machines.ends() == [STOPPED_ON_REQUEST] * 2, machines.output()
    else:
        os.kill(machines.workers(1)[1], signal.SIGKILL)
        assert all(machines.ends()), machines.output()
    again = Machines("kubernetes", folder)
    assert again.ends() == [0, 0], again.output()
    whole = Machines("kubernetes", tmp_path / "whole")
    assert whole.ends() == [0, 0]
    assert losses(folder) == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--node", "0/2"], "needs --nproc"),
        (["--nproc", "2", "--node", "2/2"], "from 0"),
        (["--nproc", "2", "--node", "0/2"], "set MASTER_ADDR"),
    ],
)
def test_odd_machines_are_refused(options, told):
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
    command = [sys.executable, "-m", "megatron_blackmamba", "train", "tiny", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == BAD_INPUT and told in " ".join(done.stderr.split())


def test_counts_of_the_scripts_agree():
    """Machines and GPUs are named several times in each file."""
    assert JOB["parallelism"] == JOB["completions"] == TASK["num_nodes"] == 7
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == 8 and TASK["resources"]["accelerators"].endswith(":8")
    service, pod = JOBSET["metadata"]["name"], JOBSET["spec"]["replicatedJobs"][0]["name"]
    assert {each["name"]: each["value"] for each in CONTAINER["env"]}["MASTER_ADDR"] == f"{service}-{pod}-0-0.{service}"
    (rule,) = JOB["podFailurePolicy"]["rules"]
    assert (
        rule["onExitCodes"]["containerName"] == CONTAINER["name"]
        and STOPPED_ON_REQUEST not in rule["onExitCodes"]["values"]
    )
