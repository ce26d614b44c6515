"""Verdicts of the watch over a run: before an update, on the samples of bad steps, and on rewinds."""

import pytest

from megatron_blackmamba.config import ParallelConfig, load
from megatron_blackmamba.formats.events import NotRewound
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.model import build
from megatron_blackmamba.runtime import world
from megatron_blackmamba.training.watch.guard import FEWEST_LOSSES, Action, Cause, Verdict
from megatron_blackmamba.training.watch.reports import Reports
from megatron_blackmamba.training.watch.watch import Watch

SPIKE = 100.0
OVERRIDES = ["training.guard.spike=rewind", "training.guard.max_spikes=2", "training.guard.replicas_every=3"]


@pytest.fixture
def told():
    return []


@pytest.fixture
def watch(tmp_path, told):
    place, config = world.start(ParallelConfig()), load("tiny", OVERRIDES)
    yield Watch(config, place, build(config, place), [], RunFolder(tmp_path), told.append)
    world.shutdown()


@pytest.fixture
def report(watch, told):
    """Report verdicts of steps of two samples each; return the samples of the event of each, if there was one."""
    steps = iter(range(0, 100, 2))

    def reported(action, cause=Cause.NOT_FINITE, reason="the loss is nan"):
        told.clear()
        first = next(steps)
        watch.report(Verdict(action, reason, cause), [(first, first + 1)])
        return [event.samples for event in told]

    return reported


def good(report):
    return report(Action.APPLY, None, None)


def test_a_bad_step_names_its_samples(report):
    assert good(report) == []
    assert report(Action.SKIP) == [[(2, 3)]]
    assert report(Action.SKIP) == [[(4, 5)]]


def test_giving_up_names_the_whole_streak(report):
    report(Action.SKIP)
    good(report)
    report(Action.SKIP)
    assert report(Action.STOP) == [[(4, 5), (6, 7)]]


def learn(watch):
    for _ in range(FEWEST_LOSSES):
        watch.settle(Verdict(Action.APPLY), 1.0, 1.0, None, lambda: 5)


def test_new_phase_has_a_loss_of_its_own(watch):
    learn(watch)
    assert watch.look(1, SPIKE, Reports(), new_phase=False).cause is Cause.SPIKE
    assert watch.look(1, SPIKE, Reports(), new_phase=True) == Verdict(Action.APPLY)


def test_replicas_are_compared_at_steps_and_before_saves(watch, monkeypatch):
    monkeypatch.setattr(watch._replicas, "differing", lambda: "rank 1")
    causes = [watch.look(step, 1.0, Reports(), new_phase=False).cause for step in (1, 2, 3, 4)]
    assert causes == [None, None, Cause.REPLICAS, None] and watch.differing() == "rank 1"


def test_a_differing_replica_says_nothing_of_the_loss(watch):
    learn(watch)
    before = watch.state()
    verdict = watch.settle(watch._guard.replicas_differ("rank 1"), SPIKE, 1.0, "found", lambda: 5)
    assert verdict.reason == "replicas of weights differ: rank 1; found" and watch.state() == before


def test_checkpoint_is_gone_back_to_only_so_often(watch, told):
    def settled(cause, newest):
        told.clear()
        verdict = watch.settle(Verdict(Action.REWIND, "bad", cause), SPIKE, 1.0, None, lambda: newest)
        watch.report(verdict, [(0, 1)])
        bad, *refused = told
        assert bad.action == verdict.action.value
        return (verdict.action, *refused)

    learn(watch)
    assert settled(Cause.REPLICAS, None) == (Action.STOP, NotRewound())
    assert [settled(Cause.REPLICAS, 5) for _ in range(2)] == [(Action.REWIND,)] * 2
    assert settled(Cause.REPLICAS, 5) == (Action.STOP, NotRewound(checkpoint=5, times=2)) and watch.state()["losses"]
    assert settled(Cause.SPIKE, 5) == (Action.SKIP, NotRewound(checkpoint=5, times=2, new_level=True))
    assert not watch.state()["losses"] and settled(Cause.SPIKE, 10) == (Action.REWIND,)
