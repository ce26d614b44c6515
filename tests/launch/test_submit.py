import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_blackmamba.config import load
from megatron_blackmamba.launch import snapshot
from megatron_blackmamba.launch.job import JobRequest, LaunchError
from megatron_blackmamba.launch.snapshot import take_snapshot
from megatron_blackmamba.launch.submit import prepare, submit


def tiny(folder: Path, *overrides: str):
    return load("tiny", [f"folder={folder}", *overrides])


def test_a_dry_run_writes_nothing(tmp_path):
    prepared = prepare(tiny(tmp_path / "runs"), JobRequest(nodes=1, gpus_per_node=2))
    assert "#SBATCH --nodes=1" in prepared.script
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "request_", "complaint"),
    [
        (["training.global_batch=9", "training.micro_batch=1"], {}, "training.global_batch=9"),
        (["data.kind=mixture", "data.mixture=nowhere.yaml"], {}, "nowhere.yaml"),
        ([], {"gpu": "smaller.yaml"}, "--suggest"),
    ],
)
@pytest.mark.skipif(not shutil.which("sbatch"), reason="no sbatch here: nothing is launched")
def test_what_the_plan_refuses_is_not_launched(tmp_path, monkeypatch, overrides, request_, complaint):
    monkeypatch.chdir(tmp_path)
    speeds = "bf16_tflops: 1\nfp32_tflops: 1\nnvlink_gb_s: 1\nnetwork_gb_s: 1\n"
    Path("smaller.yaml").write_text("name: a GPU of half a GiB\nmemory_gib: 0.5\n" + speeds)
    with pytest.raises(LaunchError, match=complaint):
        submit(tiny(tmp_path, *overrides), JobRequest(nodes=1, gpus_per_node=2, **request_))
    assert not (tmp_path / "tiny").exists()


def test_without_slurm_it_says_where_to_go_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="login node"):
        submit(tiny(tmp_path / "runs"), JobRequest(nodes=1, gpus_per_node=2))
    assert not (tmp_path / "runs").exists()


def test_a_complete_run_is_not_launched_again(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/done").touch()
    with pytest.raises(LaunchError, match="complete"):
        prepare(tiny(tmp_path), JobRequest(nodes=1, gpus_per_node=2))


def test_each_launch_has_a_folder_of_its_own(tmp_path):
    (tmp_path / "tiny/launch/001").mkdir(parents=True)
    (tmp_path / "tiny/launch/009").mkdir()
    assert prepare(tiny(tmp_path), JobRequest(nodes=1, gpus_per_node=2)).folder == tmp_path / "tiny/launch/010"


def test_a_snapshot_runs_by_itself(tmp_path):
    take_snapshot(tmp_path / "code")
    imports = "from megatron_blackmamba import config, data_tools"
    probe = f"{imports}; print(config.__file__, data_tools.__file__, config.find('tiny'))"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "code")}
    done = subprocess.run([sys.executable, "-c", probe], env=environment, cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert all(path.startswith(str(tmp_path / "code")) for path in done.stdout.split())
    assert (tmp_path / "code/scripts/slurm/train_job.sh").is_file()
    assert "commit" in (tmp_path / "code/version.txt").read_text()


def test_a_snapshot_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_blackmamba.launch.snapshot._version", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        take_snapshot(tmp_path / "code")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def fake_sbatch(tmp_path, monkeypatch):
    """One that takes the first job it is given and refuses the second."""
    (tmp_path / "bin").mkdir()
    script = f"#!/bin/sh\n[ -e {tmp_path}/first ] && echo too many >&2 && exit 1\ntouch {tmp_path}/first; echo 41\n"
    (tmp_path / "bin/sbatch").write_text(script)
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def test_a_chain_that_slurm_cuts_short_names_the_jobs_it_took(tmp_path, fake_sbatch):
    with pytest.raises(LaunchError, match=r"too many\nIn the queue already: 41 \(scancel 41"):
        submit(tiny(tmp_path / "runs"), JobRequest(nodes=1, gpus_per_node=2, chain=2))


def test_the_gpu_described_is_the_one_at_launch(tmp_path, fake_sbatch, monkeypatch):
    monkeypatch.chdir(tmp_path)
    speeds = "bf16_tflops: 1\nfp32_tflops: 1\nnvlink_gb_s: 1\nnetwork_gb_s: 1\n"
    Path("ours.yaml").write_text("name: ours\nmemory_gib: 50\n" + speeds)
    launched = submit(tiny(tmp_path / "runs"), JobRequest(nodes=1, gpus_per_node=2, gpu="ours.yaml"))
    copy = launched.folder / "gpu.yaml"
    assert f"GPU={copy}\n" in launched.script
    assert copy.read_text() == Path("ours.yaml").read_text()


def test_what_was_changed_is_noted_in_any_encoding_and_the_commit_only_if_it_is_ours(tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True
        )

    package = tmp_path / "site/megatron_blackmamba"
    package.mkdir(parents=True)
    (package / "__init__.py").write_bytes(b"one\n")
    (tmp_path / "other.txt").write_text("of the surroundings")
    git("init", "-q")
    git("add", "other.txt")
    git("commit", "-qm", "x")
    monkeypatch.setattr(snapshot, "PACKAGE", package)
    assert "commit" not in snapshot._version()
    git("add", "site")
    git("commit", "-qm", "y")
    (package / "__init__.py").write_bytes(b"caf\xe9\n")
    assert "commit" in snapshot._version() and "+caf\ufffd" in snapshot._version()
