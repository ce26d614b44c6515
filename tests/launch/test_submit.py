import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_blackmamba.checkpoint import manifest
from megatron_blackmamba.checkpoint.reading import STATE
from megatron_blackmamba.cli import app
from megatron_blackmamba.config import load, to_saved
from megatron_blackmamba.formats import branches
from megatron_blackmamba.formats.mixture import Mixture
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.launch import snapshot
from megatron_blackmamba.launch.job import SETTINGS, JobRequest, LaunchError, job_name
from megatron_blackmamba.launch.snapshot import take_snapshot
from megatron_blackmamba.launch.submit import (
    _with_absolute_paths,
    announce,
    export_command,
    job_body,
    prepare,
    submit,
)
from megatron_blackmamba.training.start.resume import ResumeError
from megatron_blackmamba.training.step.progress import Progress
from tests.data.corpus import write_mixture, write_shard


def tiny(folder: Path, *overrides: str):
    return load("tiny", [f"folder={folder}", *overrides])


def test_partition_and_account_come_from_slurms_variables(tmp_path):
    words = ["launch", "tiny", f"folder={tmp_path}", "--nodes", "1", "--gpus-per-node", "2", "--dry-run"]
    here = {"SBATCH_PARTITION": "gpu", "SBATCH_ACCOUNT": "mine"}
    said = CliRunner(env=here).invoke(app, [*words, "--account", "theirs"]).output
    assert "#SBATCH --partition=gpu\n" in said and "#SBATCH --account=theirs\n" in said


def test_a_dry_run_writes_nothing(tmp_path):
    prepared = prepare(tiny(tmp_path / "runs"), JobRequest(nodes=1, gpus_per_node="2"))
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
    speeds = "bf16_tflops: 1\nfp32_tflops: 1\nnvlink_gb_s: 1\nnetwork_gb_s: 1\nmemory_gb_s: 1\nissue_t_s: 1\n"
    Path("smaller.yaml").write_text("name: a GPU of half a GiB\nmemory_gib: 0.5\n" + speeds)
    with pytest.raises(LaunchError, match=complaint):
        submit(tiny(tmp_path, *overrides), JobRequest(nodes=1, gpus_per_node="2", **request_))
    assert not (tmp_path / "tiny").exists()


def test_without_slurm_it_names_the_login_node(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="login node"):
        submit(tiny(tmp_path / "runs"), JobRequest(nodes=1, gpus_per_node="2"))
    assert not (tmp_path / "runs").exists()


def test_a_complete_run_is_not_launched_again(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/done").touch()
    with pytest.raises(LaunchError, match="complete"):
        prepare(tiny(tmp_path), JobRequest(nodes=1, gpus_per_node="2"))


def test_each_launch_has_a_folder_of_its_own(tmp_path):
    (tmp_path / "tiny/launch/001").mkdir(parents=True)
    (tmp_path / "tiny/launch/009").mkdir()
    assert prepare(tiny(tmp_path), JobRequest(nodes=1, gpus_per_node="2")).folder == tmp_path / "tiny/launch/010"


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


def test_interrupted_chain_names_the_submitted_jobs(tmp_path, fake_sbatch):
    with pytest.raises(LaunchError, match=r"too many\nIn the queue already: 41 \(scancel 41"):
        submit(tiny(tmp_path / "runs"), JobRequest(nodes=1, gpus_per_node="2", chain=2))


@pytest.mark.parametrize(
    "said, advised",
    [
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", True),
        ("sbatch: fatal: Could not establish a configuration source", True),
        ("sbatch: error: Batch job submission failed: Invalid account", False),
    ],
)
def test_refused_submission_leaves_nothing(tmp_path, monkeypatch, said, advised):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text(f"#!/bin/sh\necho '{said}' >&2; exit 1\n")
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(LaunchError, match="Slurm refused the job") as raised:
        submit(tiny(tmp_path / "runs"), JobRequest(nodes=1, gpus_per_node="2"))
    assert said in str(raised.value) and ("launch from a login node" in str(raised.value)) == advised
    assert not (tmp_path / "runs/tiny").exists()
    (tmp_path / "runs/tiny/launch/001").mkdir(parents=True)  # of a launch that went through
    with pytest.raises(LaunchError):
        submit(tiny(tmp_path / "runs"), JobRequest(nodes=1, gpus_per_node="2"))
    assert [path.name for path in (tmp_path / "runs/tiny/launch").iterdir()] == ["001"]
    (tmp_path / "runs/tiny/launch").rename(tmp_path / "runs/tiny/logs")  # of a run that was never launched
    with pytest.raises(LaunchError):
        submit(tiny(tmp_path / "runs"), JobRequest(nodes=1, gpus_per_node="2"))
    assert [path.name for path in (tmp_path / "runs/tiny").iterdir()] == ["logs"]


def test_job_keeps_the_settings_of_its_launch(tmp_path, monkeypatch):
    """A site that passes no variables on (--export=NONE) would drop them."""
    monkeypatch.setenv("PREFLIGHT", "nodes")
    monkeypatch.setenv("DOCTOR_OPTIONS", "--threshold disk=20")
    monkeypatch.delenv("STUCK_SECONDS", raising=False)
    script = prepare(tiny(tmp_path / "runs"), JobRequest(nodes=1, gpus_per_node="2")).script
    assert "\nPREFLIGHT=nodes\n" in script and "\nDOCTOR_OPTIONS='--threshold disk=20'\n" in script
    assert "STUCK_SECONDS" not in script


def test_every_setting_is_one_of_the_job_body():
    body = job_body().read_text()
    assert all(f"${{{name}:-" in body for name in SETTINGS)


def test_the_gpu_described_is_the_one_at_launch(tmp_path, fake_sbatch, monkeypatch):
    monkeypatch.chdir(tmp_path)
    speeds = "bf16_tflops: 1\nfp32_tflops: 1\nnvlink_gb_s: 1\nnetwork_gb_s: 1\nmemory_gb_s: 1\nissue_t_s: 1\n"
    Path("ours.yaml").write_text("name: ours\nmemory_gib: 50\n" + speeds)
    launched = submit(tiny(tmp_path / "runs"), JobRequest(nodes=1, gpus_per_node="2", gpu="ours.yaml"))
    copy = launched.folder / "gpu.yaml"
    assert f"GPU={copy}\n" in launched.script
    assert copy.read_text() == Path("ours.yaml").read_text()


def test_uncommitted_changes_are_recorded_in_any_encoding(tmp_path, monkeypatch):
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


@pytest.fixture
def recording_sbatch(tmp_path, monkeypatch):
    """Keeps what each call was given, and what lay on disk at that moment."""
    (tmp_path / "bin").mkdir()
    script = f"""#!/bin/sh
job=$(($(ls {tmp_path} | grep -c '^call') + 41))
for last; do :; done
printf '%s\\n' "$@" "CODE=$CODE" "PYTHON=$PYTHON" "SLURM_JOB_ID=$SLURM_JOB_ID" >{tmp_path}/call_$job
find "$(dirname "$last")" "$(dirname "$last")/../../logs" >>{tmp_path}/call_$job
echo $job
"""
    (tmp_path / "bin/sbatch").write_text(script)
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")


def test_submitting_writes_all_before_sbatch_runs(tmp_path, trunk, recording_sbatch, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load("tiny", ["folder=runs", "start.from=trunk"])
    launched = submit(config, JobRequest(nodes=1, gpus_per_node="2", chain=2))
    assert launched.jobs == ("41", "42")
    folder = tmp_path / "runs/tiny/launch/001"
    for job in launched.jobs:
        call = (tmp_path / f"call_{job}").read_text().splitlines()
        assert call[:2] == ["--parsable", str(folder / "job.sbatch")]
        assert "SLURM_JOB_ID=" in call  # not of the job that launches
        needed = ["code/megatron_blackmamba/api.py", "code/scripts/slurm/train_job.sh", "config.yaml", "../../logs"]
        assert {str(folder / name) for name in needed} <= set(call)
    written = load(str(folder / "config.yaml"))
    assert written.folder == str(tmp_path / "runs")
    assert written.start.from_ == str(tmp_path / "trunk")
    assert (folder / "job.sbatch").read_text() == launched.script
    assert f"CODE={folder}/code\n" in launched.script
    assert launched.run.logs.is_dir()


def test_relative_paths_are_named_from_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mixture.yaml", "questions", "weights"):
        Path(name).touch()
    read = {"data.mixture": "mixture.yaml", "evaluation.data": "questions", "start.from": "weights"}
    run = _with_absolute_paths(load("tiny", ["folder=runs", *(f"{key}={path}" for key, path in read.items())]))
    assert (run.folder, run.data.mixture) == (f"{tmp_path}/runs", f"{tmp_path}/mixture.yaml")
    assert (run.evaluation.data, run.start.from_) == (f"{tmp_path}/questions", f"{tmp_path}/weights")


@pytest.fixture
def trunk(tmp_path):
    """A run with a checkpoint of step 8, as far as a branch looks at it before it loads tensors."""
    run = RunFolder(tmp_path / "trunk")
    checkpoint = run.checkpoint(8)
    checkpoint.mkdir(parents=True)
    (checkpoint / manifest.NAME).write_text("{}")
    run.latest.write_text(checkpoint.name)
    state = {"config": to_saved(load("tiny")), "progress": Progress(8, 128, 128).state(), "guard": {}, "data": {}}
    (checkpoint / STATE).write_text(json.dumps(state))
    return run


def test_branch_is_launched_at_checkpoint_of_its_plan(tmp_path, trunk, recording_sbatch, monkeypatch):
    """The trunk keeps that checkpoint while the job waits, and may save others."""
    monkeypatch.chdir(tmp_path)
    launched = submit(tiny(tmp_path / "runs", "start.branch=trunk"), JobRequest(nodes=1, gpus_per_node="2"))
    written = load(str(launched.folder / "config.yaml"))
    assert written.start.branch == f"{tmp_path}/trunk@8"
    assert branches.needed_steps(trunk) == {8} and branches.branches_of(trunk) == [(tmp_path / "runs/tiny", 8)]
    (tmp_path / "image.sif").touch()
    request = JobRequest(nodes=1, gpus_per_node="2", container="image.sif")
    assert f"{tmp_path}/trunk:{tmp_path}/trunk" in prepare(written, request).script


@pytest.mark.parametrize(
    "changes, complaint",
    [
        (["name=trunk", "model.hidden_size=32"], "step 8 was made with\n  model.hidden_size=64"),
        (["name=trunk", "training.global_batch=32"], r"resume.allow=\[training.global_batch"),
        (["start.from=trunk", "model.hidden_size=32"], "leave start.from out"),
    ],
)
def test_launch_refuses_settings_that_train_would(tmp_path, trunk, monkeypatch, changes, complaint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ResumeError, match=complaint):
        prepare(tiny(tmp_path, *changes), JobRequest(nodes=1, gpus_per_node="2"))
    prepare(tiny(tmp_path, "name=trunk"), JobRequest(nodes=1, gpus_per_node="2"))


def test_branch_refused_by_slurm_leaves_trunk_alone(tmp_path, trunk, fake_sbatch):
    (tmp_path / "first").touch()
    with pytest.raises(LaunchError, match="too many"):
        submit(tiny(tmp_path / "runs", f"start.branch={trunk.root}"), JobRequest(nodes=1, gpus_per_node="2"))
    assert not trunk.branches.exists() and not (tmp_path / "runs/tiny/launch").exists()


def test_a_container_mounts_what_the_run_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "image.sif").touch()
    for number, name in enumerate(("tokens", "tokens/more", "held out")):
        write_shard(tmp_path / name / "shard", 50 * number, 400, vocab=512)
    mixture = write_mixture(tmp_path, [{"name": "one", "shards": "tokens", "validation": "held out"}])
    (tmp_path / "questions").mkdir()
    scored = ("evaluation.every=10", "evaluation.data=questions")
    config = tiny(tmp_path / "runs", "data.kind=mixture", f"data.mixture={mixture}", *scored)

    def mounts(given: str) -> str:
        monkeypatch.setenv("CONTAINER_MOUNTS", given)
        script = prepare(config, JobRequest(nodes=1, gpus_per_node="2", container="image.sif")).script
        values = dict(line.split("=", 1) for line in script.splitlines() if line.startswith("CONTAINER"))
        assert values["CONTAINER"] == f"{tmp_path}/image.sif"
        return shlex.split(values["CONTAINER_MOUNTS"])[0]

    read = [f"{path}:{path}" for path in (tmp_path / "questions", tmp_path / "held out", tmp_path / "tokens")]
    assert mounts("/site:/site:ro,/scratch").split(",") == ["/site:/site:ro", "/scratch", *read]
    assert mounts(str(tmp_path)) == str(tmp_path)


def test_a_job_reads_the_mixture_as_launched(tmp_path, fake_sbatch, monkeypatch):
    write_shard(tmp_path / "site/tokens/[a]/one", 0, 400, vocab=512)
    write_shard(tmp_path / "site/held_out/one", 400, 90, vocab=512)
    source = {"name": "a", "shards": "tokens/[a]", "validation": "$HELD_OUT/*", "weight": 0.7}
    (tmp_path / "home").mkdir()
    mixture = write_mixture(tmp_path / "home", [source], [{"from_sample": 9, "weights": {"a": 2}}])
    mixture.write_text(mixture.read_text() + "root: ../${SITE}\n")
    monkeypatch.setenv("SITE", "site")
    monkeypatch.setenv("HELD_OUT", "held_out")
    read = Mixture.read(mixture)
    weights, prefixes = read.weights(), read.prefixes()
    overrides = ["data.kind=mixture", f"data.mixture={mixture}"]
    launched = submit(tiny(tmp_path / "runs", *overrides), JobRequest(nodes=1, gpus_per_node="2"))
    mixture.unlink()
    monkeypatch.delenv("SITE")
    monkeypatch.delenv("HELD_OUT")
    copy = load(str(launched.folder / "config.yaml")).data.mixture
    assert copy == str(launched.folder / "mixture.yaml")
    copied = Mixture.read(copy)
    assert copied.weights() == weights and copied.starts(64) == [0, 9]
    assert [path.resolve() for path in copied.prefixes()] == [path.resolve() for path in prefixes]


def test_a_second_launch_names_jobs_before_it(tmp_path, recording_sbatch):
    squeue = tmp_path / "bin/squeue"
    squeue.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/asked\necho 7\necho 9\n')
    squeue.chmod(0o755)
    launched = submit(tiny(tmp_path / "runs"), JobRequest(nodes=1, gpus_per_node="2"))
    assert launched.jobs == ("41",) and launched.waits_for == ("7", "9")
    assert "waits for job 7, 9; " in announce(launched) and "scancel 7 9\n" in announce(launched)
    assert f"--name={job_name(launched.run)} " in (tmp_path / "asked").read_text()
    squeue.write_text("#!/bin/sh\nexit 1\n")
    assert "waits" not in announce(submit(tiny(tmp_path / "runs"), JobRequest(nodes=1, gpus_per_node="2")))


def test_the_printed_commands_work_in_any_folder(tmp_path, recording_sbatch, monkeypatch):
    launched = submit(tiny(tmp_path / "two words"), JobRequest(nodes=1, gpus_per_node="2"))
    (tmp_path / "elsewhere").mkdir()
    command = export_command(launched)
    assert command in announce(launched)
    subprocess.run(["bash", "-c", f"{command} OUT"], cwd=tmp_path / "elsewhere", check=True, stderr=subprocess.DEVNULL)
    call = (tmp_path / "call_42").read_text().splitlines()
    script = launched.folder / "code/scripts/slurm/convert.sbatch"
    assert script.is_file()
    assert call[:2] == ["--dependency=afterok:41", "--kill-on-invalid-dep=yes"]
    assert call[2:6] == [str(script), "hf", str(launched.run.root), "OUT"]
    assert f"CODE={launched.folder / 'code'}" in call and f"PYTHON={sys.executable}" in call


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_launch_that_ends_before_sbatch_leaves_nothing(tmp_path, trunk, recording_sbatch, monkeypatch, failure):
    def fail(_):
        assert trunk.branches.exists()
        raise failure

    monkeypatch.setattr("megatron_blackmamba.launch.submit.to_yaml", fail)
    with pytest.raises((KeyboardInterrupt, OSError)):
        submit(tiny(tmp_path / "runs", f"start.branch={trunk.root}"), JobRequest(nodes=1, gpus_per_node="2"))
    assert not trunk.branches.exists() and not (tmp_path / "runs/tiny").exists()
