"""The script for a lent GPU, rehearsed without one: a call that is killed loses one check, and the next one goes on."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from scripts import gpu_check, gpu_run
from tests.docs.session import ROOT
from tests.thorough import thorough


def started(results, *words):
    return subprocess.Popen(
        ["bash", "scripts/gpu_check.sh", "", str(results), *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable, "REHEARSE": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def state(results):
    file = results / "state.json"
    return json.loads(file.read_text()) if file.exists() else {}


@thorough
def test_killed_call_goes_on_to_every_table(tmp_path):
    results = tmp_path / "results"
    first = started(results, "--minutes", 30, "--parts", 2, 3, 4, 5)
    while "step" not in state(results):
        assert first.poll() is None, first.stdout.read()
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    before = state(results)
    assert "generation" not in before
    second = started(results, "--minutes", 30, "--parts", 2, 3, 4, 5)
    said, _ = second.communicate()
    assert second.returncode == 0, said
    after = state(results)
    assert before["nccl"]["result"] == "passed" and after["nccl"] == before["nccl"]  # it is not run again
    assert {name for name, found in after.items() if found["result"] == "passed"} == {
        *("nccl", "step_42", "step", "step_graph", "generation", "run")
    }
    summary = (results / "summary.md").read_text()
    for printed in ("dp2", "gradients ms", "fused ms", "steps repeated", "| check | result | s | date |"):
        assert printed in summary


def test_time_that_a_part_leaves_goes_on(tmp_path):
    call = gpu_check.Call(tmp_path, minutes=1)
    quick = gpu_check.Check("quick", [sys.executable, "-c", "print('a table')"])
    slow = gpu_check.Check("slow", [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"])
    call.run(quick, 50)
    call.run(slow, 10)
    call.run(gpu_check.Check("later", ["false"]), 5)
    failing = gpu_check.Check("failing", ["false"])
    call.run(failing, 10)
    results = {name: found["result"] for name, found in gpu_check.Call(tmp_path, 1).done.items()}
    assert results == {"quick": "passed", "slow": "cut", "later": "no time", "failing": "failed, exit code 1"}
    shown = gpu_check.table(gpu_check.Part("A part", 1, [quick, slow, failing]), call)
    assert "a table" in shown and "begun" in shown and "| failing | failed, exit code 1 |" in shown


@pytest.mark.parametrize("changed, wrong", [(None, []), (5, [5])])
def test_repeated_steps_must_have_equal_losses(changed, wrong):
    steps = {step: {"loss": 1 / step} for step in range(1, 9)}
    before = json.loads(json.dumps({"saved": [4, 4], "steps": {step: steps[step] for step in range(1, 7)}}))
    if changed:
        steps[changed]["loss"] += 1e-7
    assert gpu_run.differing(before, steps) == (2, wrong)


def test_without_a_gpu_the_rehearsal_is_named(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu_check", str(tmp_path)],
        cwd=ROOT,
        env={name: x for name, x in os.environ.items() if name != "REHEARSE"} | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode and "REHEARSE=1" in done.stderr
