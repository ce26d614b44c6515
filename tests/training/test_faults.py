"""What can happen to a run on two processes, and what the run makes of it."""

import signal
import time
from random import Random

import pytest

from megatron_blackmamba.formats.events import GaveUp, NotFinite, NotRewound, Rewound, Spike
from megatron_blackmamba.formats.run_folder import RunFolder
from tests.training.faults import BAD_SAMPLE
from tests.training.runs import ON_TWO, events_of, log, losses, metrics, samples_of, wait_until

pytestmark = pytest.mark.xdist_group("forks")

SPIKES = [*ON_TWO, "training.guard.spike_window=8", "training.guard.spike_deviations=6"]  # a short, steep run
BAD_STEP = 1 + BAD_SAMPLE // 16
BATCH = f"{16 * (BAD_STEP - 1)}–{16 * BAD_STEP - 1}"


def test_undisturbed_every_step_is_recorded_once_and_the_loss_falls(undisturbed):
    assert len(undisturbed) == 30
    assert sum(undisturbed[-5:]) < 0.8 * sum(undisturbed[:5])


@pytest.mark.parametrize("fault", ["NaN", "NaNGradient"])
def test_one_micro_batch_that_is_not_a_number_costs_its_step_and_no_more(forks, tmp_path, undisturbed, fault):
    job = forks.run(tmp_path, ON_TWO, trainer=fault)
    assert job.wait() == [0, 0], job.output()
    records = metrics(tmp_path)
    assert [record["step"] for record in records] == list(range(1, 31))
    assert [record["step"] for record in records if record["skipped"]] == [BAD_STEP]
    bad = records[BAD_STEP - 1]
    assert (bad["loss"] is None) == (fault == "NaN") and bad["grad_norm"] is None
    assert [record["loss"] for record in records[: BAD_STEP - 1]] == undisturbed[: BAD_STEP - 1]
    assert all(record["loss"] is not None and record["loss"] < 5 for record in records[BAD_STEP:])
    assert f"step {BAD_STEP}: " in log(tmp_path) and BATCH in log(tmp_path)


def test_nothing_but_nan_stops_the_run_with_the_sample_ids_and_without_a_checkpoint_of_it(forks, tmp_path):
    job = forks.run(tmp_path, [*ON_TWO, "training.guard.max_bad_steps=3"], trainer="OnlyNaN")
    assert job.wait() == [65, 65]
    last = events_of(tmp_path, NotFinite)[-1]
    assert last.action == "stop" and "3 (training.guard.max_bad_steps)" in last.reason
    assert last.samples == [[16 * step, 16 * step + 15] for step in range(BAD_STEP - 1, BAD_STEP + 2)]
    assert events_of(tmp_path)[-1] == GaveUp(step=BAD_STEP + 2, saved=False)
    run = RunFolder(tmp_path / "run")
    assert not run.done.exists() and not run.requeue.exists() and not run.checkpoint(BAD_STEP + 2).exists()


def test_a_spike_is_reported_and_trained_on_when_asked_to_warn(forks, tmp_path):
    job = forks.run(tmp_path, [*SPIKES, "training.guard.spike=warn"], trainer="Spike")
    assert job.wait() == [0, 0], job.output()
    assert not any(record["skipped"] for record in metrics(tmp_path))
    assert f"step {BAD_STEP}: a spike" in log(tmp_path)
    assert [(event.step, event.action) for event in events_of(tmp_path, Spike)] == [(BAD_STEP, "apply")]


def test_a_spike_is_left_out_when_asked_to_skip(forks, tmp_path, undisturbed):
    job = forks.run(tmp_path, [*SPIKES, "training.guard.spike=skip"], trainer="Spike")
    assert job.wait() == [0, 0], job.output()
    assert [record["step"] for record in metrics(tmp_path) if record["skipped"]] == [BAD_STEP]
    assert losses(tmp_path)[: BAD_STEP - 1] == undisturbed[: BAD_STEP - 1]


def test_a_spike_is_rewound_from_and_its_samples_never_seen_again(forks, tmp_path, undisturbed):
    job = forks.run(tmp_path, [*SPIKES, "training.guard.spike=rewind"], trainer="Spike")
    assert job.wait() == [0, 0], job.output()
    records = metrics(tmp_path)
    assert [record["step"] for record in records] == list(range(1, 31))
    assert not any(record["skipped"] for record in records)
    assert [record["loss"] for record in records[: BAD_STEP - 1]] == undisturbed[: BAD_STEP - 1]
    assert max(record["loss"] for record in records[BAD_STEP - 1 :]) < 4
    assert f"past samples {BATCH}" in log(tmp_path)
    assert [(event.step, event.to) for event in events_of(tmp_path, Rewound)] == [(BAD_STEP, 20)]
    assert records[-1]["consumed_samples"] == 30 * 16
    assert sum(samples_of(tmp_path).values()) == 30 * 16


def test_where_a_rewind_meets_the_next_spike_each_time_the_loss_has_a_new_level_and_the_run_goes_on(forks, tmp_path):
    rewinding = [*SPIKES, "parallel.expert=1", "training.guard.spike=rewind", "training.guard.max_spikes=2"]
    job = forks.run(tmp_path, rewinding, trainer="Shift", ranks=1)
    assert job.wait() == [0], job.output()
    (stayed,) = events_of(tmp_path, NotRewound)
    assert (stayed.checkpoint, stayed.times, stayed.new_level) == (20, 2, True)
    records = metrics(tmp_path)
    assert [record["step"] for record in records] == list(range(1, 31))
    assert [record["step"] for record in records if record["skipped"]] == [BAD_STEP]
    assert records[-1]["consumed_samples"] == sum(samples_of(tmp_path).values()) == 30 * 16


def test_asked_to_stop_it_saves_and_goes_on_later_as_if_it_had_not(forks, tmp_path, undisturbed):
    run = RunFolder(tmp_path / "run")
    for number, ranks in ((signal.SIGUSR1, [1]), (signal.SIGTERM, None)):
        before = len(metrics(tmp_path))
        job = forks.run(tmp_path, ON_TWO)
        wait_until(lambda before=before: len(metrics(tmp_path)) > before + 3)
        job.send(number, ranks)
        assert job.wait() == [75, 75], job.output()
        assert run.requeue.exists() and not run.done.exists()
    job = forks.run(tmp_path, ON_TWO)
    assert job.wait() == [0, 0], job.output()
    assert run.done.exists() and not run.requeue.exists()
    assert losses(tmp_path) == undisturbed


def test_killed_ten_times_at_random_and_while_saving_it_still_follows_the_same_curve(forks, tmp_path, undisturbed):
    often = [*ON_TWO, "checkpoint.every=2", "checkpoint.keep_last=2"]
    random, run = Random(0), RunFolder(tmp_path / "run")
    for attempt in range(10):
        before, saves = len(metrics(tmp_path)), set(run.checkpoints.glob("*"))
        job = forks.run(tmp_path, often)
        if attempt % 2:
            wait_until(lambda saves=saves: set(run.checkpoints.glob("*")) - saves)  # now it writes
            time.sleep(random.uniform(0, 0.3))
        else:
            wanted = max(before - 2, 0) + random.randint(1, 3)
            wait_until(lambda wanted=wanted: len(metrics(tmp_path)) >= wanted)
        victims = [[0], [1], [0, 1]][attempt % 3]
        job.kill(victims)
        if attempt == 1:
            assert job.wait(60)[0] == 1  # nobody waits for ever for the dead
        job.kill()
        codes = job.wait()
        assert all(codes[rank] == 137 for rank in victims), job.output()
    job = forks.run(tmp_path, often)
    assert job.wait() == [0, 0], job.output()
    assert [record["step"] for record in metrics(tmp_path)] == list(range(1, 31))
    assert losses(tmp_path) == undisturbed
