"""Faults of a run on two processes, and the reaction of the run."""

import signal
import time
from random import Random

import pytest

from megatron_blackmamba.formats.events import GaveUp, NotFinite, NotRewound, Rewound, Spike
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.formats.step_records import metrics_so_far
from tests.thorough import thorough
from tests.training.faults import BAD_SAMPLE
from tests.training.runs import ON_TWO, events_of, log, losses, metrics, samples_of
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("forks")

SPIKES = [*ON_TWO, "training.guard.spike_window=8", "training.guard.spike_deviations=6"]  # a short, steep run
BAD_STEP = 1 + BAD_SAMPLE // 16
BATCH = f"{16 * (BAD_STEP - 1)}–{16 * BAD_STEP - 1}"


def test_undisturbed_run_records_every_step_once(undisturbed):
    assert len(undisturbed) == 30
    assert sum(undisturbed[-5:]) < 0.8 * sum(undisturbed[:5])


def test_persistent_nan_stops_the_run_with_sample_ids(forks, tmp_path):
    job = forks.run(tmp_path, [*ON_TWO, "training.guard.max_bad_steps=3"], trainer="OnlyNaN")
    assert job.wait() == [65, 65]
    last = events_of(tmp_path, NotFinite)[-1]
    assert last.action == "stop" and "3 (training.guard.max_bad_steps)" in last.reason
    assert last.samples == [[16 * step, 16 * step + 15] for step in range(BAD_STEP - 1, BAD_STEP + 2)]
    assert events_of(tmp_path)[-1] == GaveUp(step=BAD_STEP + 2, saved=False)
    run = RunFolder(tmp_path / "run")
    assert not run.done.exists() and not run.requeue.exists() and not run.checkpoint(BAD_STEP + 2).exists()


def test_spike_is_skipped_with_skip(forks, tmp_path, undisturbed):
    job = forks.run(tmp_path, [*SPIKES, "training.guard.spike=skip"], trainer="Spike")
    assert job.wait() == [0, 0], job.output()
    assert [record["step"] for record in metrics(tmp_path) if record["skipped"]] == [BAD_STEP]
    assert losses(tmp_path)[: BAD_STEP - 1] == undisturbed[: BAD_STEP - 1]


def test_rewound_spike_samples_are_never_seen_again(forks, tmp_path, undisturbed):
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


def test_killed_while_saving_again_resumes_from_first(forks, tmp_path, undisturbed):
    rewinding = [*SPIKES, "training.guard.spike=rewind", "checkpoint.keep_last=1"]
    assert forks.run(tmp_path, rewinding, trainer="KilledReplacing").wait()[0] == 128 + signal.SIGKILL
    assert not RunFolder(tmp_path / "run").checkpoint(20).exists()
    job = forks.run(tmp_path, rewinding, trainer="Spike")
    assert job.wait() == [0, 0], job.output()
    assert [record["step"] for record in metrics(tmp_path)] == list(range(1, 31))
    assert losses(tmp_path)[: BAD_STEP - 1] == undisturbed[: BAD_STEP - 1]
    assert [(event.step, event.to) for event in events_of(tmp_path, Rewound)] == [(BAD_STEP, 20)] * 2


def test_repeated_spikes_after_rewinds_become_the_new_level(forks, tmp_path):
    rewinding = [*SPIKES, "parallel.expert=1", "training.guard.spike=rewind", "training.guard.max_spikes=2"]
    job = forks.run(tmp_path, rewinding, trainer="Shift", ranks=1)
    assert job.wait() == [0], job.output()
    (stayed,) = events_of(tmp_path, NotRewound)
    assert (stayed.checkpoint, stayed.times, stayed.new_level) == (20, 2, True)
    assert [event.action for event in events_of(tmp_path, Spike)] == ["rewind", "rewind", "skip"]  # what was done
    records = metrics(tmp_path)
    assert [record["step"] for record in records] == list(range(1, 31))
    assert [record["step"] for record in records if record["skipped"]] == [BAD_STEP]
    assert records[-1]["consumed_samples"] == sum(samples_of(tmp_path).values()) == 30 * 16


def test_stop_request_saves_and_resumes_without_a_difference(forks, tmp_path, undisturbed):
    run = RunFolder(tmp_path / "run")
    for number, ranks in ((signal.SIGUSR1, [1]), (signal.SIGTERM, None)):
        before = len(metrics(tmp_path))
        job = forks.run(tmp_path, ON_TWO, until=before + 8)
        wait_until(lambda before=before: len(metrics(tmp_path)) > before + 3, job)
        job.send(number, ranks)
        job.go_on()
        assert job.wait() == [75, 75], job.output()
        assert run.requeue.exists() and not run.done.exists()
    job = forks.run(tmp_path, ON_TWO)
    assert job.wait() == [0, 0], job.output()
    assert run.done.exists() and not run.requeue.exists()
    assert losses(tmp_path) == undisturbed


def saving_or_waiting(run, saves, until):
    """A save begun again has the name of the one before, and then the run goes on until it waits."""
    return set(run.checkpoints.glob("*")) - saves or len(list(metrics_so_far(run.metrics))) == until


@thorough
def test_six_random_kills_leave_the_curve_unchanged(forks, tmp_path, undisturbed):
    often = [*ON_TWO, "checkpoint.every=2", "checkpoint.keep_last=2"]
    random, run = Random(0), RunFolder(tmp_path / "run")
    for attempt in range(6):
        before, saves = len(metrics(tmp_path)), set(run.checkpoints.glob("*"))
        job = forks.run(tmp_path, often, until=before + 2)
        if attempt % 2:
            wait_until(lambda: saving_or_waiting(run, saves, before + 2), job)  # noqa: B023 - called at once
            time.sleep(random.uniform(0, 0.3))
        else:
            wanted = max(before - 2, 0) + random.randint(1, 3)
            wait_until(lambda wanted=wanted: len(metrics(tmp_path)) >= wanted, job)
        victims = [[0], [1], [0, 1]][attempt % 3]
        job.kill(victims)
        if attempt == 1:
            job.go_on()
            assert job.wait()[0] == 1  # nobody waits for ever for the dead
        job.kill()
        codes = job.wait()
        assert all(codes[rank] == 137 for rank in victims), job.output()
    job.go_on()
    job = forks.run(tmp_path, often)
    assert job.wait() == [0, 0], job.output()
    assert [record["step"] for record in metrics(tmp_path)] == list(range(1, 31))
    assert losses(tmp_path) == undisturbed
