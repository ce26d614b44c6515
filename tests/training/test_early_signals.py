"""A request to stop that comes before training listens: during imports, while the model is built or loaded."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_blackmamba.formats.run_folder import RunFolder
from tests.thorough import thorough
from tests.training.runs import ON_TWO, SMALL, log, metrics
from tests.waiting import Command, wait_until

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.xdist_group("forks")


WAITS_IN_IMPORTS = """
import importlib.abc, os, sys, time
class Wait(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            open(os.environ["HERE"] + "/importing", "w").close()
            while not os.path.exists(os.environ["HERE"] + "/go_on"):
                time.sleep(0.01)
sys.meta_path.insert(0, Wait())
"""


WITH_TWO = pytest.param(["--nproc", "2"], marks=thorough, id="nproc")


@pytest.mark.parametrize("more", [pytest.param([], id="alone"), WITH_TWO])
def test_sigterm_during_imports_exits_with_75(tmp_path, more):
    (tmp_path / "sitecustomize.py").write_text(WAITS_IN_IMPORTS)
    command = [sys.executable, "-m", "megatron_blackmamba", "train", "tiny", *more, *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path), "HERE": str(tmp_path)}
    process = subprocess.Popen(
        [*command, f"folder={tmp_path}", "name=run"], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
    )
    wait_until((tmp_path / "importing").exists, Command(process))
    process.send_signal(signal.SIGTERM)
    (tmp_path / "go_on").touch()
    assert process.wait(900) == 75
    run = RunFolder(tmp_path / "run")
    assert run.requeue.exists() and not run.done.exists()
    assert not list(run.checkpoints.glob("*")) and not metrics(tmp_path)


def test_stopped_while_building_or_loading_it_resumes_later(forks, tmp_path):
    run = RunFolder(tmp_path / "run")
    until = "training.stop_after_steps=2"
    for step in (0, 2):
        stopped = forks.run(tmp_path, [*ON_TWO, until], asked=[1])
        assert stopped.wait() == [75, 75], stopped.output()
        assert run.requeue.exists() and len(metrics(tmp_path)) == step
        assert f"stops on request at step {step} (the same command" in log(tmp_path)
        if step == 0:
            job = forks.run(tmp_path, [*ON_TWO, until])
            assert job.wait() == [0, 0], job.output()


def test_minutes_stop_a_run_which_then_resumes(tmp_path):
    """Here they have passed before the first step; then a run ends before they have, and waits for nothing."""
    command = [
        sys.executable,
        "-m",
        "megatron_blackmamba",
        "train",
        "tiny",
        "--nproc",
        "2",
        *SMALL,
        f"folder={tmp_path}",
    ]
    done = subprocess.run([*command, "name=run", "--minutes", "0.001"], cwd=ROOT, capture_output=True, text=True)
    run = RunFolder(tmp_path / "run")
    assert done.returncode == 75, done.stderr
    assert run.requeue.exists() and "stops on request at step 0 (the same command" in run.log.read_text()
    again = [*command, "name=run", "--minutes", "60"]
    done = subprocess.run(again, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and run.done.exists(), done.stderr
