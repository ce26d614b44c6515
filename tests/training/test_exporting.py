"""The schedule of the exports that a run writes itself."""

import errno
import os
import time

import pytest

from megatron_blackmamba.checkpoint import SaveError
from megatron_blackmamba.config import ConfigError, load
from megatron_blackmamba.formats.events import Exported, NotExported
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.interchange import hf
from megatron_blackmamba.training.keep import background
from megatron_blackmamba.training.keep.background import Background
from megatron_blackmamba.training.keep.export_checks import ExportChecks
from megatron_blackmamba.training.keep.exporting import Exporter
from tests.reference import tiny
from tests.reference.canonical import canonical
from tests.thorough import thorough
from tests.training.runs import ON_TWO, events_of
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("forks")


class Exports:
    """Counts the exports of an Exporter, which fail at the steps in `failing`."""

    def __init__(self, every, there=(), failing=()):
        self.done, self.events, self.failing = [], [], failing
        unchecked = ExportChecks("none", RunFolder("nowhere"), self.events.append)
        self.exporter = Exporter(every, self.export, there.__contains__, self.events.append, unchecked)

    def export(self, step):
        if step in self.failing:
            raise SaveError("write: rank 1: No space left on device")
        self.done.append(step)

    def train(self, steps, bad=()):
        for step in steps:
            (self.exporter.postpone if step in bad else self.exporter.after_step)(step)
        return self


def test_exports_are_due_at_multiples_and_at_end():
    exports = Exports(3).train(range(1, 8))
    exports.exporter.last(7)
    assert exports.done == [3, 6, 7]
    assert [event.step for event in exports.events if isinstance(event, Exported)] == [3, 6, 7]
    exports.train([8, 9]).exporter.last(9)
    assert exports.done == [3, 6, 7, 9]


@thorough
def test_exports_that_fail_their_check_are_reported(tmp_path):
    folder, reported = RunFolder(tmp_path), []
    hf.write(canonical(tiny("silu")), folder.export(1))
    with open(folder.export(1) / "modeling_blackmamba.py", "a") as file:
        file.write("raise ImportError('no such name')\n")
    checks = ExportChecks("short", folder, reported.append)
    checks.hurry()  # other tests would starve it
    checks.add(1)
    wait_until(lambda: not checks.busy)
    (failed,) = reported
    assert failed.step == 1 and "ImportError: no such name" in failed.sentence
    checks.add(1)
    checks.stop()
    assert not checks.busy and len(reported) == 1


class Chatty(Background):
    """A command that says more than a pipe holds."""

    def __init__(self):
        super().__init__()
        self.problems = []

    def command(self, step):
        return ["verify", "nothing" * 10_000]

    def ended(self, step, problem):
        self.problems.append(problem)


def test_a_command_may_say_much():
    chatty = Chatty()
    chatty.hurry()  # other tests would starve it
    chatty.add(1)
    wait_until(lambda: not chatty.busy)
    (problem,) = chatty.problems
    assert "File name too long" in problem


def test_commands_that_cannot_start_are_reported(monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(background.subprocess, "Popen", refuse)
    chatty = Chatty()
    chatty.add(1)
    chatty.add(2)
    assert not chatty.busy and not chatty.waiting
    assert ["could not be started" in problem for problem in chatty.problems] == [True, True]


def test_a_slow_check_is_no_hang(forks, tmp_path):
    (tmp_path / "slow").mkdir()
    os.mkfifo(tmp_path / "slow" / "config.json")
    whole = ["checkpoint.export_every=100", "training.precision=fp32", "data.kind=synthetic", "training.tokens=1024"]
    job = forks.run(tmp_path, [*ON_TWO, *whole], trainer="SlowCheck")
    done = RunFolder(tmp_path / "run").done
    wait_until(done.exists, job)  # scripts need not wait for the check
    time.sleep(5)
    assert not job.ended(), job.output()
    (tmp_path / "slow" / "config.json").write_text("{}")
    assert job.wait() == [0, 0], job.output()
    assert [event.step for event in events_of(tmp_path, NotExported)] == [1]


def test_bad_steps_postpone_an_export():
    assert Exports(3).train(range(1, 7), bad=[3, 4]).done == [5, 6]


def test_finished_run_is_exported_once():
    started_again = Exports(3, there=[7])
    started_again.exporter.last(7)
    assert started_again.done == []
    repeated = Exports(3, there=[7]).train([7])
    repeated.exporter.last(7)
    assert repeated.done == [7]


def test_failed_export_is_reported_and_training_continues():
    exports = Exports(3, failing=[3]).train(range(1, 7))
    assert exports.done == [6]
    assert "step 3 has no usable export (write: rank 1: No space left" in exports.events[0].sentence


def test_models_that_do_not_convert_are_refused():
    load("tiny", ["training.precision=fp64"])
    with pytest.raises(
        ConfigError, match=r"checkpoint.export_every cannot export this model: training.precision=fp64 "
    ):
        load("tiny", ["training.precision=fp64", "checkpoint.export_every=5"])
