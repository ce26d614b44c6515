import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_blackmamba.launch import hardware, software
from megatron_blackmamba.launch.allreduce import AllReduceError, time_all_reduce
from megatron_blackmamba.launch.doctor import examine
from megatron_blackmamba.launch.findings import Finding


def doctor(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "megatron_blackmamba", "doctor", *arguments]
    return subprocess.run(command, text=True, capture_output=True, timeout=300, env=os.environ | env)


def test_a_full_examination_covers_every_part_and_ends_with_a_command(tmp_path):
    done = doctor("--json", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout)
    assert seen["healthy"]
    assert {finding["part"] for finding in seen["findings"]} == {"software", "backends", "machine", "devices", "disk"}
    assert any(finding["name"].startswith("all-reduce") for finding in seen["findings"])
    assert seen["next_command"].startswith("blackmamba ")


def test_a_node_with_too_few_gpus_fails_its_preflight(tmp_path):
    done = doctor("--quick", "--gpus", "64", "--folder", str(tmp_path))
    assert done.returncode == 1
    assert "64 expected" in done.stdout


@pytest.mark.parametrize("how", [(), ("--quick",)])
def test_a_torch_that_does_not_import_is_what_the_doctor_is_for(tmp_path, how):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    done = doctor(*how, "--json", "--folder", str(tmp_path), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    (problem,) = (finding for finding in json.loads(done.stdout)["findings"] if finding["status"] == "problem")
    assert "libcudart.so.12" in problem["found"]
    assert "make -B install" in problem["advice"]


def test_the_preflight_names_a_folder_it_cannot_write():
    problems = examine(Path("/proc/self/runs"), quick=True).problems
    assert [problem.part for problem in problems] == ["disk"]
    assert "folder=" in problems[0].advice


def test_a_run_folder_that_is_not_there_yet_is_not_made(tmp_path):
    finding = next(hardware.disk(tmp_path / "a/b/c", mebibytes=1))
    assert finding.status == "ok"
    assert str(tmp_path) in finding.found
    assert list(tmp_path.iterdir()) == []


def test_local_processes_that_cannot_meet_are_reported_with_the_reason(monkeypatch):
    assert time_all_reduce(2, on_gpus=False, mebibytes=1, repeats=1) > 0
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-card")
    with pytest.raises(AllReduceError, match=r"rank [01]: "):
        time_all_reduce(2, on_gpus=False, mebibytes=1, repeats=1)


def test_every_op_has_one_backend_in_use():
    findings = list(software.backends())
    in_use = [finding.name.partition(":")[0] for finding in findings if finding.found == "in use"]
    assert len(in_use) == len(set(in_use))
    assert {"selective_scan", "causal_conv1d"} <= set(in_use)
    assert not [finding for finding in findings if finding.status == "problem"]


def test_a_verdict_carries_advice_only_where_it_is_needed():
    assert Finding.judge("part", "name", "found", True, "do that") == Finding("part", "name", "found")
    assert Finding.judge("part", "name", "found", False, "do that").advice == "do that"


@pytest.mark.parametrize(("bf16", "advised"), [(200.0, "bf16"), (5.0, "fp32")])
def test_the_faster_precision_of_this_processor_is_advised(monkeypatch, bf16, advised):
    rates = {torch.float32: 100.0, torch.bfloat16: bf16}
    monkeypatch.setattr(hardware, "_products_per_second", rates.get)
    (finding,) = hardware.matrix_products()
    assert finding.found.endswith(f"training.precision={advised}")
