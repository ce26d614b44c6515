"""Which samples the events of bad steps name."""

from types import SimpleNamespace

import pytest

from megatron_blackmamba.training.guard import Action, Cause, Verdict
from megatron_blackmamba.training.loop import Trainer


@pytest.fixture
def report():
    """Report verdicts of steps of two samples each; return the samples of the event of each, if there was one."""
    trainer = SimpleNamespace(
        first_sample=0, bad_samples=[], progress=SimpleNamespace(next_sample=0, between=lambda a, b: list(range(a, b)))
    )

    def reported(action, cause=Cause.NOT_FINITE, reason="the loss is nan"):
        told = []
        trainer.event = told.append
        trainer.first_sample = trainer.progress.next_sample
        trainer.progress.next_sample += 2
        Trainer.report(trainer, Verdict(action, reason, cause))
        return [event.samples for event in told]

    return reported


def good(report):
    return report(Action.APPLY, None, None)


def test_a_bad_step_names_its_samples(report):
    assert good(report) == []
    assert report(Action.SKIP) == [[2, 3]]
    assert report(Action.SKIP) == [[4, 5]]


def test_giving_up_names_the_whole_streak(report):
    report(Action.SKIP)
    good(report)
    report(Action.SKIP)
    assert report(Action.STOP) == [[4, 5, 6, 7]]
