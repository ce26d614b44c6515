"""The schedule of the exports that a run writes itself."""

import pytest

from megatron_blackmamba.checkpoint import SaveError
from megatron_blackmamba.config import ConfigError, load
from megatron_blackmamba.formats.events import Exported
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.interchange import hf
from megatron_blackmamba.training.keep.export_checks import ExportChecks
from megatron_blackmamba.training.keep.exporting import Exporter
from tests.reference import tiny
from tests.reference.canonical import canonical
from tests.thorough import thorough


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
    checks.add(1)
    checks.wait()
    (failed,) = reported
    assert failed.step == 1 and "ImportError: no such name" in failed.sentence
    checks.add(1)
    checks.stop()
    checks.wait()
    assert len(reported) == 1


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
