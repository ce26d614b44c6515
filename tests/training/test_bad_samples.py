"""Which samples the events of bad steps name."""

import pytest

from megatron_blackmamba.config import ParallelConfig, load
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.model import build
from megatron_blackmamba.runtime import world
from megatron_blackmamba.training.watch.guard import Action, Cause, Verdict
from megatron_blackmamba.training.watch.watch import Watch


@pytest.fixture
def report(tmp_path):
    """Report verdicts of steps of two samples each; return the samples of the event of each, if there was one."""
    place, config, told, steps = world.start(ParallelConfig()), load("tiny"), [], iter(range(0, 100, 2))
    watch = Watch(config, place, build(config, place), [], RunFolder(tmp_path), told.append)

    def reported(action, cause=Cause.NOT_FINITE, reason="the loss is nan"):
        told.clear()
        first = next(steps)
        watch.report(Verdict(action, reason, cause), [(first, first + 1)])
        return [event.samples for event in told]

    yield reported
    world.shutdown()


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
