"""Training under Slurm: real jobs of two nodes with the tiny model, started as a user starts them."""

import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from megatron_blackmamba.evaluation.tasks import PAPER
from megatron_blackmamba.formats.run_folder import RunFolder
from tests.slurm.conftest import REPOSITORY
from tests.slurm.runs import kill, launchers, log_of, losses, newest, ranks, train_alone, tries, writers

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]
TWO_CPU_NODES = ("--nodes", "2", "--gpus-per-node", "0", "--cpus-per-process", "1", "--time", "60", "--json")
SCRIPTS = REPOSITORY / "scripts/slurm"
INTERRUPTED = ("parallel.expert=2", "training.tokens=1e9")


def launch(blackmamba, *arguments: str) -> tuple[RunFolder, list[str]]:
    answer = json.loads(blackmamba("launch", *arguments, *TWO_CPU_NODES).stdout)
    return RunFolder(Path(answer["run"])), answer["jobs"]


def submit_pretraining(slurm, log: Path, run: Path, *config: str, time=("--time=60",), gpus: str = "0") -> str:
    """The shipped script on two nodes, with another config in place of its own."""
    return slurm.submit(
        *("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1", f"--output={log}", *time),
        *(SCRIPTS / "pretrain_1.5b.sbatch", "tiny", *config),
        cwd=REPOSITORY,
        PYTHON=sys.executable,
        RUN_FOLDER=str(run),
        GPUS_PER_NODE=gpus,
    )


def test_chain_resumes_after_each_job_and_exports(slurm, blackmamba, tmp_path):
    odd = 'name=7\'s "a#b" 50%j'  # what shells, sbatch and YAML each read in their own way
    run, (first, second) = launch(blackmamba, "tiny", odd, "training.tokens=122880", "--chain", "2")
    export = slurm.submit(
        *(f"--dependency=afterok:{second}", "--kill-on-invalid-dep=yes", "--cpus-per-task=2", "--mem=4G"),
        *(f"--output={tmp_path}/export.log", SCRIPTS / "convert.sbatch", "hf", run.root, tmp_path / "export"),
        cwd=REPOSITORY,
        PYTHON=sys.executable,
    )
    slurm.wait(first, log_of(run, first), until=lambda _: len(losses(run)) >= 5)
    slurm.run("scancel", "--batch", "--signal=USR1", first)  # what --signal=B:USR1@... sends, now
    ended = slurm.wait(first, log_of(run, first))
    text = log_of(run, first).read_text()
    assert ended["JobState"] == "COMPLETED" and f"job {second} continues the run" in text, text
    assert "error" not in text and "Force Terminated" not in text, text
    stopped_at = len(losses(run))
    assert 5 <= stopped_at < 60

    assert slurm.wait(second, log_of(run, second))["JobState"] == "COMPLETED", log_of(run, second).read_text()
    assert len(losses(run)) == 60
    assert run.done.exists()
    for job in (first, second):
        assert {file.name for file in (run.logs / job).glob("rank-*")} == {"rank-0.log", "rank-1.log"}
        assert "head node1" in log_of(run, job).read_text()

    exported = slurm.wait(export, tmp_path / "export.log")
    assert exported["JobState"] == "COMPLETED", (tmp_path / "export.log").read_text()
    assert json.loads((tmp_path / "export/config.json").read_text())["auto_map"]


def limit_time(slurm, job: str, minutes: int) -> None:
    slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")


@pytest.fixture(scope="module")
def alone(cluster, tmp_path_factory) -> dict[int, float]:
    """The losses of the run that several tests interrupt, left alone."""
    return train_alone(cluster, tmp_path_factory.mktemp("alone"), *INTERRUPTED, "training.stop_after_steps=40")


def test_run_survives_a_time_limit_with_equal_losses(slurm, alone, tmp_path):
    run, log = RunFolder(tmp_path / "slurm"), tmp_path / "job.log"
    job = submit_pretraining(slurm, log, run.root, *INTERRUPTED, time=("--time=60", "--signal=B:USR1@600"))
    slurm.wait(job, log, until=lambda _: len(losses(run)) >= 3)
    stopped = ranks(slurm, job)
    kill(stopped, signal.SIGSTOP)
    hours, minutes, _ = map(int, slurm.show(job)["RunTime"].split(":"))
    limit_time(slurm, job, 60 * hours + minutes + 5)  # the warning is due; Slurm looks every 30 s
    slurm.wait(job, log, until=lambda _: "the time limit is near" in log.read_text())
    limit_time(slurm, job, 60)  # one interruption is enough
    kill(stopped, signal.SIGCONT)
    slurm.wait(job, log, until=lambda shown: shown["Restarts"] == "1")
    boundary = len(losses(run))
    assert boundary > 0, log.read_text()

    slurm.wait(job, log, until=lambda _: len(losses(run)) >= boundary + 3)
    slurm.run("scancel", job)
    assert slurm.wait(job, log)["JobState"] == "CANCELLED"
    assert slurm.show(job)["Restarts"] == "1"  # cancelled is cancelled
    saved = losses(run)
    assert run.checkpoint(len(saved)).is_dir(), "scancel lets the run save what it has"
    assert all(saved.get(step, loss) == loss for step, loss in alone.items())


def test_bad_node_or_early_failure_requeues_the_job(slurm, blackmamba):
    differing = slurm.namespaces and os.geteuid() == 0  # only root can make one node differ from the others
    slurm.set_node("node1", "drain")  # so that the job must take node3
    try:
        with slurm.cramped("node3") if differing else contextlib.nullcontext():
            run, (job,) = launch(blackmamba, "tiny", "training.stop_after_steps=8", "--restarts", "0")
            log = log_of(run, job)
            if differing:
                slurm.wait(job, log, until=lambda shown: shown["ExcNodeList"] == "node3")
                assert "shared memory" in log.read_text()  # why node3 was left out
    finally:
        slurm.set_node("node1", "resume")
    slurm.wait(job, log, until=lambda _: bool(losses(run)))
    kill(ranks(slurm, job, 1))
    ended, text = slurm.wait(job, log), log.read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", str(1 + differing)), text
    assert ended["NodeList"] == "node[1-2]" or not differing, text
    assert "stopped without a new checkpoint" in text
    assert text.count("preflight of") == 2 + differing
    assert len(losses(run)) == 8


def test_three_kills_do_not_leave_the_allocation(slurm, blackmamba, alone):
    """A rank before the first checkpoint, the launcher, and a writer or a rank; tests/slurm/storm.py kills more.

    The job is the last of a chain, whose next job is cancelled: stopped at last, it announces none.
    """
    run, (job, following) = launch(blackmamba, "tiny", *INTERRUPTED, "checkpoint.every=10", "--chain", "2")
    slurm.run("scancel", following)
    log = log_of(run, job)

    def wait(until):
        slurm.wait(job, log, until=lambda _: until())

    wait(lambda: bool(losses(run)))
    wait(lambda: kill(ranks(slurm, job, 1)))
    wait(lambda: tries(run, job) == 2 and newest(run) >= 10)
    assert "rank 1 was the first (Killed)" in log.read_text()
    wait(lambda: kill(launchers(slurm, job)))
    saved = newest(run)
    wait(lambda: tries(run, job) == 3 and newest(run) > saved)
    wait(lambda: kill(writers(slurm, job) or ranks(slurm, job, 0)))
    wait(lambda: newest(run) >= len(alone))
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    ended, text = slurm.wait(job, log), log.read_text()
    assert (ended["ExitCode"], ended["Restarts"]) == ("75:0", "0"), text
    assert "no further job of this run is queued" in text, text
    assert {step: losses(run)[step] for step in alone} == alone


def test_refused_training_is_not_restarted(slurm, blackmamba, tmp_path):
    (tmp_path / "runs/tiny").mkdir(parents=True)
    (tmp_path / "runs/tiny/requeue").touch()  # left by an earlier job
    blackmamba("train", "tiny", "name=before", "training.stop_after_steps=1")
    run, (job,) = launch(blackmamba, "tiny", f"start.from={tmp_path}/runs/before", "--sbatch=--hold")
    shutil.rmtree(tmp_path / "runs/before")  # what launch found is gone when the job starts
    slurm.run("scontrol", "release", job)
    ended = slurm.wait(job, log_of(run, job))
    text = log_of(run, job).read_text()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0"), text
    assert tries(run, job) == 1
    assert "/runs/before: no " in text  # the reason, without looking into the ranks' logs


def test_a_job_that_the_plan_refuses_trains_nothing(slurm, tmp_path):
    log, run = tmp_path / "job.log", tmp_path / "run"
    job = submit_pretraining(slurm, log, run, "parallel.expert=1", "training.global_batch=9", "training.micro_batch=1")
    ended = slurm.wait(job, log)
    assert ended["ExitCode"] == "2:0", log.read_text()
    assert "nothing was started" in log.read_text()
    assert not RunFolder(run).checkpoints.exists()


def test_common_preflight_failure_blames_no_node(slurm, tmp_path):
    log, run = tmp_path / "job.log", tmp_path / "run"
    job = submit_pretraining(slurm, log, run, "parallel.expert=2", gpus="1")  # this node has no GPU
    ended = slurm.wait(job, log)
    assert (ended["JobState"], ended["Restarts"], ended["ExcNodeList"]) == ("FAILED", "0", "(null)")
    assert "it is not the nodes" in log.read_text()
    assert "0, 1 expected" in log.read_text()


def test_kept_checkpoints_are_scored_by_separate_jobs(slurm, blackmamba, tmp_path):
    keep = ("training.tokens=40960", "checkpoint.every=10", "checkpoint.keep_every=10", "checkpoint.keep_last=1")
    for task in PAPER:
        (tmp_path / f"{task}.jsonl").touch()
    site = "--sbatch=--export=NONE"  # passes on nothing of the environment; what the job sets reaches its ranks
    run, (job,) = launch(blackmamba, "tiny", "name=scored", *keep, "--evaluate", str(tmp_path), site)
    slurm.wait(job, log_of(run, job))
    steps = sorted(path.name for path in run.checkpoints.glob("step_*"))
    assert len(steps) >= 2
    submitted = {path.stem: path.read_text().strip() for path in run.evaluations.glob("step_*.job")}
    assert sorted(submitted) == steps, log_of(run, job).read_text()
    for scoring in submitted.values():
        shown = slurm.wait(scoring, run.logs / f"evaluate-{scoring}.log")
        assert (shown["TimeLimit"], shown["Nice"]) == ("01:00:00", "10000")
        said = (run.logs / f"evaluate-{scoring}.log").read_text()
        assert "blackmamba: " in said and "Traceback" not in said  # the tiny model has no tokenizer: one line
