import errno
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.config import load, to_yaml
from megatron_blackmamba.launch import checkpoint_space, hardware, limits, software
from megatron_blackmamba.launch.allreduce import AllReduceError, time_all_reduce
from megatron_blackmamba.launch.doctor import _next_command, examine
from megatron_blackmamba.launch.findings import Finding
from megatron_blackmamba.launch.thresholds import Thresholds
from megatron_blackmamba.plan import storage
from tests.small_disk import small_disk
from tests.thorough import thorough


def doctor(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "megatron_blackmamba", "doctor", *arguments]
    return subprocess.run(command, text=True, capture_output=True, env=os.environ | env)


def test_full_report_covers_everything_and_suggests_a_command(tmp_path):
    done = doctor("--json", "--folder", str(tmp_path), "--threshold", "disk=0")  # a busy disk is slow
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout)
    assert seen["healthy"]
    assert {finding["part"] for finding in seen["findings"]} == {"software", "backends", "machine", "devices", "disk"}
    names = [finding["name"] for finding in seen["findings"]]
    assert any(name.startswith("all-reduce") for name in names)
    assert torch.cuda.is_available() or "matrix products" in names
    assert seen["next_command"].startswith("blackmamba ")


def test_driver_too_old_for_pytorch_is_told(tmp_path, monkeypatch):
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Mon\nGCC version: 12\n"
    )
    monkeypatch.setattr(hardware, "DRIVER", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    why = hardware._why_no_gpu()
    assert "driver 535.161.08 and PyTorch for CUDA 13.0" in why and "pip install 'torch<2.11'" in why


def test_node_with_too_few_gpus_fails_its_preflight(tmp_path):
    done = doctor("--quick", "--gpus", "64", "--folder", str(tmp_path))
    assert done.returncode == 1
    assert "64 expected" in done.stdout


def test_doctor_runs_with_a_broken_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    done = doctor("--json", "--folder", str(tmp_path), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    (problem,) = (finding for finding in json.loads(done.stdout)["findings"] if finding["status"] == "problem")
    assert "libcudart.so.12" in problem["found"]
    assert "make -B install" in problem["advice"]


def test_the_preflight_names_a_folder_it_cannot_write():
    problems = examine(Path("/proc/self/runs"), quick=True).problems
    assert [problem.part for problem in problems] == ["disk"]
    assert "folder=" in problems[0].advice


def test_missing_run_folder_is_not_created(tmp_path):
    finding = next(hardware.disk(tmp_path / "a/b/c", 1, 0.0))
    assert finding.status == "ok"
    assert str(tmp_path) in finding.found
    assert list(tmp_path.iterdir()) == []


@thorough
def test_unreachable_local_processes_are_reported_with_reasons(monkeypatch):
    assert time_all_reduce(2, on_gpus=False, mebibytes=1, repeats=1) > 0
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-card")
    with pytest.raises(AllReduceError, match=r"rank [01]: "):
        time_all_reduce(2, on_gpus=False, mebibytes=1, repeats=1)


def problems(done: subprocess.CompletedProcess) -> dict[str, dict[str, str]]:
    found = json.loads(done.stdout)["findings"]
    return {finding["name"]: finding for finding in found if finding["status"] == "problem"}


def test_open_file_limit_and_wrong_card_are_named(tmp_path):
    """Test `ulimit -n 64` and a network card of another machine in one process, to save time."""
    command = ["bash", "-c", 'ulimit -n 64; exec "$@"', "bash", sys.executable, "-m", "megatron_blackmamba", "doctor"]
    cards = {"GLOO_SOCKET_IFNAME": "none0", "NCCL_SOCKET_IFNAME": "none1,none2"}
    done = subprocess.run(
        [*command, "--quick", "--json", "--folder", str(tmp_path), "--threshold", "disk=0"],
        text=True,
        capture_output=True,
        env=os.environ | cards,
    )
    assert done.returncode == 1, done.stderr
    found = problems(done)
    assert set(found) == {"open files", *cards}
    assert "64" in found["open files"]["found"] and "ulimit" in found["open files"]["advice"]
    assert all("lo" in found[name]["advice"] for name in cards)  # which there are


@pytest.mark.parametrize(
    ("variable", "value", "good"),
    [
        ("NCCL_SOCKET_IFNAME", "l", True),  # a prefix
        ("NCCL_SOCKET_IFNAME", "=l", False),  # a name
        ("NCCL_SOCKET_IFNAME", "=lo", True),
        ("NCCL_SOCKET_IFNAME", "none0,lo", True),
        ("NCCL_SOCKET_IFNAME", "^docker", True),
        ("GLOO_SOCKET_IFNAME", "l", False),
        ("GLOO_SOCKET_IFNAME", "lo,none0", False),
        ("NCCL_IB_HCA", "none0", False),
    ],
)
def test_card_names_are_read_as_their_library_does(monkeypatch, variable, value, good):
    monkeypatch.setenv(variable, value)
    (finding,) = (each for each in limits.network_cards() if each.name == variable)
    assert (finding.status == "ok") == good, finding


@pytest.fixture
def slow_disk(tmp_path):
    """A cgroup whose processes write 20 MiB/s to the disk of tmp_path; yields the file to join it by."""
    group = Path("/sys/fs/cgroup/blkio/slow-disk-test")
    device = os.stat(tmp_path).st_dev
    try:
        group.mkdir()
        (group / "blkio.throttle.write_bps_device").write_text(f"{os.major(device)}:{os.minor(device)} {20 * 2**20}")
    except OSError as error:
        pytest.skip(f"no cgroup here that slows a disk down: {error}")
    yield group / "cgroup.procs"
    group.rmdir()


def test_a_slow_disk_is_measured(tmp_path, slow_disk):
    measure = (
        "from pathlib import Path; from megatron_blackmamba.launch import hardware;"
        f" print(*hardware.disk(Path({str(tmp_path)!r}), 16, 40))"
    )
    slowly = f"echo $$ >{slow_disk} && exec {sys.executable} -c {shlex.quote(measure)}"
    done = subprocess.run(["bash", "-c", slowly], text=True, capture_output=True)
    assert "status='problem'" in done.stdout and "at least 40 MiB/s are expected" in done.stdout, done
    assert next(hardware.disk(tmp_path, 16, 1)).status == "ok"


def test_less_space_than_two_checkpoints_is_a_problem(tmp_path):
    config = load("tiny", [f"folder={tmp_path}"])
    size = checkpoint_space.checkpoint_bytes(config)
    with small_disk(tmp_path, int(1.5 * size)):
        (finding,) = checkpoint_space.judge(tmp_path, config, Thresholds())
        assert finding.status == "problem" and "2 checkpoints must fit" in finding.advice
        assert next(checkpoint_space.judge(tmp_path, config, Thresholds(checkpoints=1))).status == "ok"
        saved = tmp_path / "tiny/checkpoints/step_00000010"
        saved.mkdir(parents=True)
        (saved / "weights").write_bytes(bytes(int(0.4 * size)))  # space that a deleted checkpoint gives back
        assert next(checkpoint_space.judge(tmp_path, config, Thresholds(checkpoints=1.4))).status == "ok"
        (saved / "weights").write_bytes(bytes(int(0.6 * size)))
        assert next(checkpoint_space.judge(tmp_path, config, Thresholds(checkpoints=1.4))).status == "problem"


def test_too_many_checkpoints_for_disk_are_warned_of(tmp_path, monkeypatch):
    config = load("tiny", [f"folder={tmp_path}", "checkpoint.every=10", "checkpoint.keep_every=10"])
    count = len(storage.kept_steps(config)) + 1
    size = checkpoint_space.checkpoint_bytes(config)
    usage = shutil.disk_usage(tmp_path)

    def findings(free: int) -> list[str]:
        monkeypatch.setattr(checkpoint_space.shutil, "disk_usage", lambda path: usage._replace(free=free))
        return [finding.status for finding in checkpoint_space.judge(tmp_path, config, Thresholds())]

    assert count > 3
    assert findings(count * size) == ["ok"] and findings(count * size - 1) == ["ok", "warning"]
    assert findings(size) == ["problem"]


def test_full_disk_is_not_taken_for_missing_permission(tmp_path, monkeypatch):
    def full(place, mebibytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hardware, "_disk_speed", full)
    (finding,) = hardware.disk(tmp_path, 1, 1)
    assert finding.status == "problem" and finding.advice == "free some space"


@thorough
def test_a_checkpoint_is_as_large_as_expected(tmp_path):
    """Bytes on disk of a checkpoint, within 10%."""
    config = load("tiny", [f"folder={tmp_path}", "training.stop_after_steps=1", "logging.tensorboard=false"])
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-m", "megatron_blackmamba", "train", str(tmp_path / "run.yaml"), "--nproc", "1"]
    subprocess.run(command, check=True, capture_output=True)
    (checkpoint,) = (tmp_path / "tiny/checkpoints").glob("step_*")
    written = sum(file.stat().st_size for file in checkpoint.iterdir())
    assert written == pytest.approx(checkpoint_space.checkpoint_bytes(config), rel=0.1)


def test_a_named_run_is_judged_by_its_space(tmp_path):
    done = CliRunner().invoke(app, ["doctor", "tiny", "--quick", "--json", "--folder", str(tmp_path)])
    (space,) = (finding for finding in json.loads(done.stdout)["findings"] if finding["name"] == "space")
    assert "a checkpoint of tiny takes" in space["found"]


@pytest.mark.parametrize(("gpus", "backend"), [(0, "gloo"), (1, "gloo"), (2, "NCCL")])
def test_all_reduce_names_its_backend(monkeypatch, gpus, backend):
    monkeypatch.setattr(hardware, "time_all_reduce", lambda *_, **__: 0.001)
    assert f"over {backend}" in next(hardware.all_reduce(gpus)).found


def test_every_op_has_one_backend_in_use():
    findings = list(software.backends())
    in_use = [finding.name.partition(":")[0] for finding in findings if finding.found == "in use"]
    assert len(in_use) == len(set(in_use))
    assert {"selective_scan", "causal_conv1d"} <= set(in_use)
    assert not [finding for finding in findings if finding.status == "problem"]


@pytest.mark.parametrize(("unlimited", "status"), [(True, "ok"), (False, "problem")])
def test_infiniband_needs_unlimited_locked_memory(monkeypatch, tmp_path, unlimited, status):
    monkeypatch.setattr(hardware, "Path", lambda name: tmp_path)  # /sys/class/infiniband
    assert list(hardware.locked_memory()) == []
    (tmp_path / "mlx5_0").touch()
    limit = resource.RLIM_INFINITY if unlimited else 2**16
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    (finding,) = hardware.locked_memory()
    assert finding.status == status


def test_any_of_the_known_compilers_will_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert next(software.programs()).status == "warning"
    (tmp_path / "clang++").touch(mode=0o755)
    assert next(software.programs()) == Finding("software", "C++ compiler", "clang++")


def test_unmet_requirement_is_a_problem_with_a_remedy(monkeypatch):
    monkeypatch.setattr(software, "unmet", lambda: ["torch 1.0 is here, and this project needs >=2.6"])
    (finding,) = (finding for finding in software.imports() if finding.name == "requirements")
    assert finding.status == "problem" and finding.advice == software.REPAIR


def test_backends_that_cannot_run_are_notes():
    missing = [finding for finding in software.backends() if finding.found not in ("available", "in use")]
    assert missing and {finding.status for finding in missing} == {"note"}


@pytest.mark.parametrize(("bf16", "advised"), [(200.0, "bf16"), (5.0, "fp32")])
def test_the_faster_precision_of_this_processor_is_advised(monkeypatch, bf16, advised):
    rates = {torch.float32: 100.0, torch.bfloat16: bf16}
    monkeypatch.setattr(hardware, "_products_per_second", rates.get)
    (finding,) = hardware.matrix_products()
    assert finding.found.endswith(f"training.precision={advised}")


def test_unwritable_folder_is_told_in_words():
    (finding,) = hardware.disk(Path("/proc/runs"), 16, 40)
    assert finding.found.startswith("/proc: cannot write here: ")
    said = _next_command([finding], quick=True)
    assert said.startswith("fix the disk, at the run's path: name a folder that you can write to, with --folder")
