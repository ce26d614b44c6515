"""Runs from their config to what they leave on disk, and how they go on under other circumstances."""

import json
import os
import subprocess
from contextlib import suppress
from hashlib import sha256

import pytest

from megatron_blackmamba.checkpoint import CheckpointReader
from megatron_blackmamba.checkpoint.reading import find_checkpoint, read_state
from megatron_blackmamba.config import load
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.report.history import read_history
from tests.data.corpus import write_mixture, write_shard
from tests.small_disk import small_disk
from tests.training.runs import ON_TWO, SMALL, log, losses, metrics, samples_of, scalars
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("forks")


@pytest.fixture(scope="module")
def half(forks, tmp_path_factory):
    """A run on two processes, stopped after 10 of its 30 steps."""
    folder = tmp_path_factory.mktemp("half")
    job = forks.run(folder, [*ON_TWO, "training.stop_after_steps=10"])
    assert job.wait() == [0, 0], job.output()
    return folder


@pytest.fixture
def copy_of_half(half, tmp_path):
    subprocess.run(["cp", "-r", half / "run", tmp_path / "run"], check=True)
    return tmp_path


def test_a_run_leaves_everything_one_looks_for(forks, tmp_path):
    job = forks.run(
        tmp_path,
        [
            *(*SMALL, "training.stop_after_steps=6", "training.evaluate_every=3", "training.router_every=2"),
            *("training.profile=[2,3]", "logging.tensorboard=true", "training.evaluate_batches=1"),
        ],
        ranks=1,
    )
    assert job.wait() == [0], job.output()
    run, records = RunFolder(tmp_path / "run"), metrics(tmp_path)
    for path in (run.config, run.data_plan, run.log, run.checkpoint(6), run.latest):
        assert path.exists(), path
    assert list(run.tensorboard.iterdir())
    assert [path.name for path in run.profile.iterdir()] == ["steps_2_3_rank_0.json.gz"]
    assert [record["step"] for record in records if "validation/loss" in record] == [3, 6]
    assert [record["step"] for record in records if "experts/1/max_over_mean" in record] == [2, 4, 6]
    last = records[-1]
    assert set(scalars(last, "validation/loss/*")) == {"synthetic_0", "synthetic_1", "synthetic_2"}
    assert set(scalars(last, "experts/*/max_over_mean")) == {"1", "3"}
    assert sum(scalars(last, "experts/*/share/*").values()) == pytest.approx(2, abs=1e-4)
    assert last["consumed_tokens"] == 6 * 16 * 64 and sum(scalars(last, "source/samples/*").values()) == 96
    assert last["speed/memory_bytes"] > 2**27 and last["consumed_flops"] > 1e9


def test_early_stop_is_resumable_and_restart_adds_nothing(forks, copy_of_half):
    run = RunFolder(copy_of_half / "run")
    before = run.metrics.read_text()
    job = forks.run(copy_of_half, [*ON_TWO, "training.stop_after_steps=10"])
    assert job.wait() == [0, 0], job.output()
    assert run.metrics.read_text() == before
    assert not run.done.exists() and not run.requeue.exists()
    assert "20 steps of the run are left" in log(copy_of_half)


def test_freely_changeable_keys_do_not_affect_losses(forks, tmp_path):
    """Change at once every key that test_resume.py lists so, but the name and the folder."""
    exactly, other = (
        [*ON_TWO, "training.precision=fp64", "training.global_batch=4", "training.micro_batch=2"],
        tmp_path / "other",
    )
    first = forks.run(other, [*exactly, "training.stop_after_steps=10"])
    assert first.wait() == [0, 0], first.output()
    subprocess.run(["cp", "-r", other / "run", tmp_path / "run"], check=True)
    until = "training.stop_after_steps=14"
    changed = [
        *("data.workers=0", "training.overlap=false", "training.recompute=layers"),
        *("training.evaluate_every=3", "training.evaluate_batches=1", "training.router_every=3"),
        *("training.profile=[12,12]", "training.guard.max_bad_steps=2", "training.guard.hang_seconds=300"),
        *("training.guard.replicas_every=3", "training.guard.slow_ratio=2", "training.guard.slow_steps=2"),
        *("checkpoint.every=3", "checkpoint.keep_last=1", "checkpoint.keep_every=4", "checkpoint.asynchronous=false"),
        *("checkpoint.retry_every=2", "checkpoint.if_damaged=stop", "logging.tensorboard=true"),
        *("logging.wandb_project=other", "start.from=nowhere", "resume.allow=[optimizer]"),
    ]
    jobs = [forks.run(tmp_path, [*exactly, until, *changed]), forks.run(other, [*exactly, until])]
    assert [job.wait() for job in jobs] == [[0, 0], [0, 0]], jobs[0].output()
    assert len(losses(other)) == 14 and losses(tmp_path) == pytest.approx(losses(other), abs=1e-10)


def test_bf16_with_sharded_optimizer_resumes_bit_for_bit(forks, tmp_path):
    bf16 = [*ON_TWO, "training.precision=bf16", "optimizer.weight_decay=0.1"]
    stops = {"whole": [8], "parts": [4, 8]}
    for name, steps in stops.items():
        for last in steps:
            job = forks.run(tmp_path / name, [*bf16, f"training.stop_after_steps={last}"])
            assert job.wait() == [0, 0], job.output()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_run_stopped_in_its_last_step_is_done(forks, tmp_path):
    job = forks.run(tmp_path, [*SMALL, "training.tokens=4096"], trainer="StoppedAtTheEnd")
    assert job.wait() == [0, 0], job.output()
    assert (tmp_path / "run/done").exists() and len(losses(tmp_path)) == 4


def test_checkpoint_names_the_code_that_trained_it(forks, tmp_path):
    job = forks.run(tmp_path, [*SMALL, "training.tokens=2048"], trainer="Edited")
    assert job.wait() == [0, 0], job.output()
    assert read_state(find_checkpoint(tmp_path / "run"), ("modules",))["modules"] == {}


def test_resumed_run_closes_all_batches_it_opened(forks, copy_of_half):
    overrides = [*ON_TWO, "training.stop_after_steps=11", "data.workers=1"]
    job = forks.run(copy_of_half, overrides, trainer="OpenStreams")
    assert job.wait() == [0, 0], job.output()
    assert (copy_of_half / "streams").read_text() == "2 opened, 0 open"


def test_other_model_is_refused_without_touching_the_run(forks, copy_of_half):
    run = RunFolder(copy_of_half / "run")
    for marker in (run.requeue, run.failed):
        marker.touch()
    before = contents(run.root)
    job = forks.run(copy_of_half, [*ON_TWO, "model.router.iterations=2"])
    assert job.wait() == [1, 1]
    assert "model.router.iterations=1, and now it is 2" in job.output()
    assert contents(run.root) == before


def test_allowed_learning_rate_change_acts_from_next_step(forks, copy_of_half):
    changed = [*ON_TWO, "optimizer.learning_rate=6e-4", "optimizer.decay=constant", "training.stop_after_steps=12"]
    assert forks.run(copy_of_half, changed).wait() == [1, 1]
    job = forks.run(copy_of_half, [*changed, "resume.allow=[optimizer]"])
    assert job.wait() == [0, 0], job.output()
    rates = [record["learning_rate"] for record in metrics(copy_of_half)]
    assert rates[9] > 2e-3 and rates[10:] == [6e-4, 6e-4]
    assert "optimizer.learning_rate: 0.0006 from step 11 on, 0.003 before" in log(copy_of_half)


def test_changed_global_batch_trains_only_the_remaining_tokens(forks, copy_of_half):
    larger = [
        *ON_TWO,
        "training.global_batch=48",
        "resume.allow=[training.global_batch]",
        "training.evaluate_every=1000",
    ]
    job = forks.run(copy_of_half, [*larger, "training.evaluate_batches=1"])
    assert job.wait() == [0, 0], job.output()
    records, run = metrics(copy_of_half), RunFolder(copy_of_half / "run")
    assert [record["consumed_samples"] for record in records[9:]] == list(range(160, 160 + 8 * 48, 48))  # of 480
    last, lowest = records[-1], load("tiny").optimizer.min_learning_rate
    assert last["step"] == 17 and run.checkpoint(17).exists() and run.done.exists()
    assert "validation/loss" in last and last["learning_rate"] == pytest.approx(lowest)
    assert "7 steps of 3072 tokens to go" in log(copy_of_half) and "done at step 17" in log(copy_of_half)
    assert json.loads(run.data_plan.read_bytes())["planned"]["samples"] == 496
    assert read_history(run.root).total_steps == 17


def test_weights_of_another_run_start_a_new_run(forks, half, tmp_path):
    job = forks.run(tmp_path, [*SMALL, f"start.from={half / 'run'}", "training.stop_after_steps=2"], ranks=1)
    assert job.wait() == [0], job.output()
    first, fresh = metrics(tmp_path)[0], metrics(half)[0]
    assert first["step"] == 1 and first["learning_rate"] == fresh["learning_rate"]
    assert first["loss"] < metrics(half)[7]["loss"] < fresh["loss"]


def test_ranks_start_from_one_checkpoint_of_training_run(forks, tmp_path):
    source = RunFolder(tmp_path / "source/run")
    job = forks.run(tmp_path / "source", [*SMALL, "checkpoint.every=1", "training.stop_after_steps=2"], ranks=1)
    assert job.wait() == [0], job.output()
    source.latest.write_text("step_00000001\n")
    new = [*SMALL, f"start.from={source.root}", "training.stop_after_steps=1"]
    job = forks.run(tmp_path, new, trainer="MovingSource")
    assert job.wait(300) == [0, 0], job.output()


def test_damaged_checkpoint_is_named_and_the_previous_used(forks, copy_of_half):
    longer = [*ON_TWO, "training.stop_after_steps=12", "checkpoint.every=2"]
    assert forks.run(copy_of_half, longer).wait() == [0, 0]
    shard = next(RunFolder(copy_of_half / "run").checkpoint(12).glob("__1_0.distcp"))
    with open(shard, "r+b") as file:
        file.seek(shard.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    expected = losses(copy_of_half)
    job = forks.run(copy_of_half, [*longer, "checkpoint.if_damaged=stop"])
    assert job.wait() == [1, 1]
    assert "step_00000012" in job.output()
    job = forks.run(copy_of_half, longer)
    assert job.wait() == [0, 0], job.output()
    assert "resumes after step 10" in log(copy_of_half) and shard.name in log(copy_of_half)
    assert losses(copy_of_half) == expected


def test_mixture_may_change_only_from_here_on(forks, tmp_path):
    for first_token, name in ((0, "a"), (250, "b")):
        write_shard(tmp_path / name / "one", first_token, 250, vocab=512, tokenizer=sha256(b"{}").hexdigest())
    (tmp_path / "a/tokenizer.json").write_text("{}")
    sources = [{"name": name, "shards": name} for name in "ab"]
    mixed = [*SMALL, "data.kind=mixture", f"data.mixture={tmp_path}/mixture.yaml", "data.sequence_length=16"]
    write_mixture(tmp_path, sources)
    assert forks.run(tmp_path, [*mixed, "training.stop_after_steps=4"], ranks=1).wait() == [0]
    assert samples_of(tmp_path) == {"a": 32, "b": 32}
    assert RunFolder(tmp_path / "run").tokenizer.read_text() == "{}"

    write_mixture(tmp_path, [sources[0], {**sources[1], "weight": 3}])
    job = forks.run(tmp_path, [*mixed, "training.stop_after_steps=6"], ranks=1)
    assert job.wait() == [1]
    assert "phase 0" in job.output() and "sample 64" in job.output()
    write_mixture(tmp_path, sources, [{"from_sample": 64, "weights": {"b": 3}}])
    job = forks.run(tmp_path, [*mixed, "training.stop_after_steps=6"], ranks=1)
    assert job.wait() == [0], job.output()
    assert samples_of(tmp_path) == {"a": 40, "b": 56}
    guard = CheckpointReader(tmp_path / "run").state["guard"]
    assert guard["losses"] == losses(tmp_path)[4:]  # what was usual before the phase is forgotten


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", 40 * 2**20) as disk:
        yield disk


def test_full_disk_keeps_the_last_checkpoint_and_training(forks, disk, tmp_path):
    ballast, run = disk / "ballast", RunFolder(disk / "run")
    often = [f"folder={disk}", "checkpoint.every=5", "checkpoint.keep_last=1", "checkpoint.retry_every=2"]
    job = forks.run(tmp_path, [*ON_TWO, *often, "training.tokens=81920"], until=2)  # of 80 steps
    refused = "could not be saved"
    wait_until(lambda: "step 1 " in job.output(), job)
    fill(ballast)  # the first save cannot write a single file
    job.go_on(12)
    wait_until(lambda: job.output().count(refused) >= 1, job)
    os.truncate(ballast, ballast.stat().st_size - 200_000)  # the next meets the end of the disk while writing tensors
    said = job.output().count(refused)
    job.go_on(30)
    wait_until(lambda: job.output().count(refused) >= said + 2, job)
    assert not list(run.checkpoints.glob("step_*"))
    ballast.unlink()
    job.go_on(45)
    wait_until(lambda: list(run.checkpoints.glob("step_*")), job)
    said = job.output().count(refused)
    # The next saves, and the records of the steps meanwhile, find the disk full: freed space is filled up again
    # (a save under way when the disk fills up may still end well, and then gives back the checkpoint before it).
    job.go_on(79)
    wait_until(lambda: fill(ballast) or job.output().count(refused) > said, job)
    assert len(list(run.checkpoints.glob("step_*"))) == 1
    ballast.unlink()
    job.go_on()
    assert job.wait() == [0, 0], job.output()
    assert run.checkpoint(80).exists() and run.done.exists()
    assert [record["step"] for record in metrics(disk)] == list(range(1, 81))


def test_start_on_a_full_disk_names_the_file(forks, disk, tmp_path):
    run = RunFolder(disk / "run")
    run.checkpoints.mkdir(parents=True)
    fill(disk / "ballast")
    job = forks.run(tmp_path, [*SMALL, f"folder={disk}"], ranks=1)
    assert job.wait() == [1]
    assert f"No space left on device: '{run.root}/" in job.output()


def contents(folder):
    """Return every file and folder of a run, but for what the lock and the heartbeats say of the last process."""
    passing = {"lock", "heartbeats"}
    found = (path for path in sorted(folder.rglob("*")) if not passing & set(path.parts))
    return {path.relative_to(folder): path.is_file() and (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


def test_refused_first_start_leaves_no_folder(forks, tmp_path):
    elsewhere = [f"folder={tmp_path}/more", "logging.tensorboard=true", "model.norm_eps=0.1"]
    job = forks.run(tmp_path / "job", [*ON_TWO, "training.stop_after_steps=1"])
    assert job.wait() == [0, 0], job.output()
    weights = RunFolder(tmp_path / "job/run").checkpoint(1)
    job = forks.run(tmp_path / "job", [*ON_TWO, *elsewhere, f"start.from={weights}"])
    assert job.wait() == [1, 1] and "norm_eps" in job.output()
    assert not (tmp_path / "more").exists()


def fill(path):
    with open(path, "ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\0" * 65536)
