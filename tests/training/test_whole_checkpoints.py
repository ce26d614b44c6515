"""Checkpoints that cannot be used or written: a run never starts over by itself, nor loses what it just saved."""

import shutil

import pytest

from megatron_blackmamba.checkpoint import CheckpointReader
from megatron_blackmamba.formats.run_folder import RunFolder
from tests.training.runs import ON_TWO, SMALL, log, losses, metrics

pytestmark = pytest.mark.xdist_group("forks")
LONGER = [*ON_TWO, "checkpoint.keep_last=1", "training.stop_after_steps=7"]


@pytest.fixture(scope="module")
def saved(forks, tmp_path_factory):
    """A run of 6 steps with checkpoints of the last three: 4, 5 and 6. The first could not be read back."""
    folder = tmp_path_factory.mktemp("saved")
    often = ["checkpoint.every=1", "checkpoint.keep_every=0", "checkpoint.retry_every=1"]
    job = forks.run(folder, [*ON_TWO, *often, "training.stop_after_steps=6"], trainer="ReadsBackBadlyOnce")
    assert job.wait() == [0, 0], job.output()
    return folder


@pytest.fixture
def run(saved, tmp_path):
    shutil.copytree(saved / "run", tmp_path / "run")
    return RunFolder(tmp_path / "run")


def shard(run, step):
    return next(run.checkpoint(step).glob("__1_0.distcp"))


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def folders(run):
    return sorted(path.name for path in run.checkpoints.glob("step_*"))


def test_unreadable_checkpoint_is_saved_again_and_reported(saved):
    said = log(saved)
    assert "could not be saved (step 1: rank 1: reading back __1_0.distcp: " in said and "Input/output error" in said
    assert [step for step in range(1, 7) if f"saved step {step}\n" in said] == [2, 3, 4, 5, 6]
    assert folders(RunFolder(saved / "run")) == [f"step_0000000{step}" for step in (4, 5, 6)]


def test_ranks_share_the_writing(saved):
    """Rank 1 also writes weights that both ranks hold, not only its own experts."""
    sizes = [
        sum(path.stat().st_size for path in RunFolder(saved / "run").checkpoint(6).glob(f"__{rank}_*.distcp"))
        for rank in (0, 1)
    ]
    assert min(sizes) > 0.9 * max(sizes)


def test_saves_after_a_damaged_checkpoint_are_kept(forks, run, tmp_path, saved):
    damage(shard(run, 6))
    (run.checkpoint(5) / ".DS_Store").touch()
    validated = [*LONGER, "training.evaluate_every=7", "training.evaluate_batches=1"]
    job = forks.run(tmp_path, [*validated, "training.stop_after_steps=7"], trainer="Narrating")
    assert job.wait() == [0, 0], job.output()
    assert "resumes after step 5" in log(tmp_path) and losses(tmp_path)[:6] == losses(saved)
    assert folders(run) == ["step_00000006.damaged", "step_00000007"]
    assert CheckpointReader(run.root).step == 7
    told = log(tmp_path).split("the watchdog was told: ")[1]
    for long in ("opening the data", "step_00000005; loading step 5; step 6", "validation on synthetic_1"):
        assert long in told


def test_only_damaged_checkpoints_stop_the_run_unchanged(forks, run, tmp_path):
    for step in (4, 5, 6):
        damage(shard(run, step))
    before = run.metrics.read_bytes(), run.latest.read_text(), folders(run)
    job = forks.run(tmp_path, LONGER)
    assert job.wait() == [1, 1]
    assert "every checkpoint in" in job.output() and shard(run, 6).name in job.output()
    assert (run.metrics.read_bytes(), run.latest.read_text(), folders(run)) == before


def test_unreadable_storage_is_not_taken_for_damage(forks, run, tmp_path):
    path = shard(run, 6)
    path.unlink()
    path.symlink_to(path.name)  # to itself: whoever opens it is refused
    job = forks.run(tmp_path, LONGER)
    assert job.wait() == [1, 1]
    assert f"{path}: cannot be read: Too many levels of symbolic links" in job.output()
    assert len(metrics(tmp_path)) == 6 and len(folders(run)) == 3


def test_run_that_gives_up_finishes_its_last_save(forks, tmp_path):
    settings = ["checkpoint.every=2", "training.guard.max_bad_steps=1"]
    job = forks.run(tmp_path, [*ON_TWO, *settings], trainer="EarlyNaN")
    assert job.wait() == [65, 65]
    assert "saved step 2\n" in log(tmp_path)
    assert folders(RunFolder(tmp_path / "run")) == ["step_00000002"]


def test_run_without_its_last_save_is_resumed(forks, tmp_path):
    settings = [*SMALL, "checkpoint.every=25"]
    job = forks.run(tmp_path, settings, ranks=1, trainer="LastSaveFails")
    assert job.wait() == [75], job.output()
    run = RunFolder(tmp_path / "run")
    assert run.requeue.exists() and not run.done.exists() and folders(run) == ["step_00000025"]
    assert "stops at step 30, which is not saved (the same command resumes it)" in log(tmp_path)
    job = forks.run(tmp_path, settings, ranks=1)
    assert job.wait() == [0] and run.done.exists() and run.checkpoint(30).exists()


def test_folder_in_place_of_latest_is_refused(forks, tmp_path):
    run = RunFolder(tmp_path / "run")
    run.latest.mkdir(parents=True)
    job = forks.run(tmp_path, SMALL, ranks=1)
    assert job.wait() == [1]
    assert f"{run.latest}: is a folder, where a run writes a file. Move it away" in job.output()
    assert not run.metrics.exists()
