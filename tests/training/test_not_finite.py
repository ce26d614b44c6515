"""Steps that are not finite: run again, named, kept out of checkpoints."""

import socket

import pytest

from megatron_blackmamba.formats.events import DeviceFailed, GaveUp, NotFinite, NotRewound
from megatron_blackmamba.formats.run_folder import RunFolder
from tests.thorough import thorough
from tests.training.faults import BAD_SAMPLE
from tests.training.runs import ON_TWO, SMALL, events_of, log, losses, metrics

pytestmark = pytest.mark.xdist_group("forks")

BAD_STEP = 1 + BAD_SAMPLE // 16
FIRST = BAD_SAMPLE // 4 * 4  # of its micro-batch; two ranks take turns
WHERE = f"rank {FIRST // 4 % 2} ({socket.gethostname()}) in the {{what}} of samples {FIRST}–{FIRST + 3}"


@pytest.mark.parametrize(
    "fault, what", [("NaNOnce", "loss"), pytest.param("NaNGradientOnce", "gradient", marks=thorough)]
)
def test_value_finite_on_rerun_costs_nothing(forks, tmp_path, undisturbed, fault, what):
    job = forks.run(tmp_path, ON_TWO, trainer=fault)
    assert job.wait() == [0, 0], job.output()
    assert losses(tmp_path) == undisturbed
    bad = metrics(tmp_path)[BAD_STEP - 1]
    (failed,) = events_of(tmp_path, DeviceFailed)
    assert not bad["skipped"] and failed.step == BAD_STEP and failed.action == "apply"
    assert WHERE.format(what=what) in failed.reason and failed.reason in log(tmp_path)


@pytest.mark.parametrize("fault, what", [pytest.param("NaN", "loss", marks=thorough), ("NaNGradient", "gradient")])
def test_persistent_non_finite_value_blames_data_or_model(forks, tmp_path, undisturbed, fault, what):
    job = forks.run(tmp_path, ON_TWO, trainer=fault)
    assert job.wait() == [0, 0], job.output()
    (bad,) = events_of(tmp_path, NotFinite)
    assert (bad.step, bad.action, bad.samples) == (BAD_STEP, "skip", [[16 * BAD_STEP - 16, 16 * BAD_STEP - 1]])
    assert "the same when run again, so the data or the model" in bad.reason
    assert WHERE.format(what=what) in bad.reason
    records = metrics(tmp_path)
    assert [record["step"] for record in records if record["skipped"]] == [BAD_STEP]
    skipped = records[BAD_STEP - 1]
    assert (skipped["loss"] is None) == (what == "loss") and skipped["grad_norm"] is None
    assert losses(tmp_path)[: BAD_STEP - 1] == undisturbed[: BAD_STEP - 1]
    assert all(record["loss"] is not None and record["loss"] < 5 for record in records[BAD_STEP:])


def test_rewinding_in_vain_gives_up(forks, tmp_path):
    settings = ["training.guard.spike=rewind", "training.guard.max_spikes=2", "training.guard.max_bad_steps=3"]
    job = forks.run(tmp_path, [*SMALL, *settings], trainer="OnlyNaN", ranks=1)
    assert job.wait() == [65], job.output()
    stayed = events_of(tmp_path, NotRewound)[0]
    assert (stayed.checkpoint, stayed.times, stayed.new_level) == (20, 2, False)
    assert "bad steps in a row: 3" in events_of(tmp_path, NotFinite)[-1].reason
    assert [event.saved for event in events_of(tmp_path, GaveUp)] == [False]


def test_a_run_that_diverges_saves_nothing_of_it(forks, tmp_path):
    diverging = ["checkpoint.every=5", "optimizer.learning_rate=1e4", "optimizer.clip=0"]
    job = forks.run(tmp_path, [*SMALL, *diverging, "optimizer.warmup_fraction=0"], ranks=1)
    assert job.wait() == [65], job.output()
    assert [event.step for event in events_of(tmp_path, GaveUp)] == [6]
    assert not list(RunFolder(tmp_path / "run").checkpoints.glob("step_*"))


def test_save_due_at_a_bad_step_is_postponed(forks, tmp_path):
    due = [f"checkpoint.every={BAD_STEP}", f"training.stop_after_steps={BAD_STEP + 3}"]
    job = forks.run(tmp_path, [*SMALL, *due], trainer="NaN", ranks=1)
    assert job.wait() == [0], job.output()
    saved = sorted(path.name for path in RunFolder(tmp_path / "run").checkpoints.glob("step_*"))
    assert saved == [f"step_{step:08d}" for step in (BAD_STEP + 1, BAD_STEP + 3)]


def test_ending_in_bad_steps_saves_only_good_weights(forks, tmp_path):
    ending = f"training.stop_after_steps={BAD_STEP + 1}"
    job = forks.run(tmp_path, [*SMALL, ending], trainer="NaNWhileTraining", ranks=1)
    assert job.wait() == [0], job.output()
    assert RunFolder(tmp_path / "run").checkpoint(BAD_STEP + 1).exists()
