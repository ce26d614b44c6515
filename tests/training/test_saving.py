"""When the Saver saves, and what it does about a save that fails."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_blackmamba.checkpoint import NotFiniteError, SaveError
from megatron_blackmamba.settings import CheckpointConfig
from megatron_blackmamba.training.keep import saving
from megatron_blackmamba.training.keep.saving import Saver


class Scripted:
    """A stand-in for Checkpoints: a save takes `steps_to_write` calls of finish, and fails on request."""

    def __init__(self, folder: Path) -> None:
        self.folder = SimpleNamespace(root=folder)
        self.calls: list[str] = []
        self.fail_to_begin: list[Exception] = []
        self.fail_to_finish: list[Exception] = []
        self.steps_to_write = 1
        self.writing: int | None = None
        self.published: list[int] = []
        self.bytes = 0

    def save(self, step, state):
        self.calls.append(f"save {step}")
        if self.fail_to_begin:
            raise self.fail_to_begin.pop(0)
        self.writing, self.left = step, self.steps_to_write

    def finish(self, wait):
        if self.writing is None:
            return []
        self.calls.append("wait" if wait else "look")
        self.left -= 1
        if self.left > 0 and not wait:
            return []
        step, self.writing = self.writing, None
        if self.fail_to_finish:
            raise self.fail_to_finish.pop(0)
        self.published.append(step)
        return [step]

    def size(self):
        return self.bytes

    def newest(self):
        return max(self.published, default=None)


@pytest.fixture
def checkpoints(tmp_path):
    return Scripted(tmp_path)


@pytest.fixture
def said():
    return []


@pytest.fixture
def saver(checkpoints, said):
    def make(**settings):
        config = CheckpointConfig(**{"every": 5, "retry_every": 2, **settings})
        return Saver(config, checkpoints, dict, lambda event: said.append(event.sentence))

    return make


@pytest.fixture
def naps(monkeypatch):
    taken = []
    monkeypatch.setattr(saving.time, "sleep", taken.append)
    return taken


def steps(saver, first, last):
    for step in range(first, last + 1):
        saver.after_step(step)


@pytest.mark.parametrize("every, saved", [(4, [4, 6, 8, 12, 16, 18, 20]), (0, [])])
def test_steps_to_keep_forever_are_saved(saver, checkpoints, every, saved):
    """Also those that are no multiple of checkpoint.every."""
    steps(saver(every=every, keep_every=6), 1, 21)
    assert checkpoints.published == saved


def test_every_zero_saves_only_the_end(saver, checkpoints):
    made = saver(every=0)
    steps(made, 1, 20)
    assert checkpoints.calls == [] and made.last(20) and checkpoints.published == [20]


def test_asynchronous_saves_are_looked_after_each_step(saver, checkpoints):
    checkpoints.steps_to_write = 3
    made = saver()
    steps(made, 1, 8)
    assert checkpoints.calls == ["save 5", "look", "look", "look"] and checkpoints.published == [5]


def test_synchronous_saves_are_waited_for(saver, checkpoints):
    checkpoints.steps_to_write = 3
    made = saver(asynchronous=False)
    steps(made, 1, 5)
    assert checkpoints.calls == ["save 5", "wait"] and checkpoints.published == [5]


def test_next_save_waits_for_the_one_before(saver, checkpoints):
    checkpoints.steps_to_write = 100
    made = saver()
    steps(made, 1, 10)
    assert checkpoints.published == [5] and checkpoints.calls[-3:] == ["wait", "save 10", "look"]


@pytest.mark.parametrize("when", ["fail_to_begin", "fail_to_finish"])
def test_failed_save_is_retried_and_reported_once(saver, checkpoints, said, when, tmp_path):
    getattr(checkpoints, when).append(SaveError("step 5: the disk is full"))
    made = saver()
    steps(made, 1, 6)
    assert checkpoints.published == [] and len(said) == 1 and "\n" not in said[0]
    assert "step 5: the disk is full" in said[0] and f"GB free in {tmp_path}" in said[0]
    steps(made, 7, 9)
    assert checkpoints.published == [7] and [call for call in checkpoints.calls if "save" in call] == [
        "save 5",
        "save 7",
    ]


def test_removed_run_folder_is_reported_not_raised(saver, checkpoints, said, tmp_path):
    checkpoints.folder.root = tmp_path / "gone"
    checkpoints.fail_to_begin.append(SaveError("step 5: prepare"))
    steps(saver(), 1, 5)
    assert "gone: No such file or directory" in said[0]


def test_weights_that_are_not_finite_are_not_retried(saver, checkpoints, said, naps):
    checkpoints.fail_to_finish += [NotFiniteError("step 5: bias is not finite on rank 0")] * 2
    made = saver()
    steps(made, 1, 9)
    assert [call for call in checkpoints.calls if "save" in call] == ["save 5"]
    assert len(said) == 1 and said[0].startswith("not saved: step 5: bias is not finite on rank 0; ")
    assert not made.last(9) and naps == [] and checkpoints.published == []


def test_last_save_is_tried_six_times(saver, checkpoints, naps):
    checkpoints.fail_to_begin += [SaveError("full")] * 5
    assert saver().last(30) and checkpoints.published == [30] and naps == [5.0] * 5
    checkpoints.fail_to_finish += [SaveError("full")] * 7
    naps.clear()
    assert not saver().last(31) and len(checkpoints.fail_to_finish) == 1 and naps == [5.0] * 5


def test_only_the_last_attempt_is_not_retried(saver, checkpoints, said, naps):
    checkpoints.fail_to_begin += [SaveError("full")] * 6
    made = saver()
    assert not made.last(30) and made.last_failed
    first, last = said
    assert first.endswith("is tried again") and "tried again 5 times; there is none" in last


def test_full_disk_is_named_with_size_needed(saver, checkpoints, said):
    for checkpoints.bytes in (2**60, 5):
        checkpoints.fail_to_begin = [SaveError("step 5: unexpected")]
        steps(saver(), 5, 5)
    assert "the disk is full: " in said[0] and ", and a checkpoint takes 1.15e+09 GB" in said[0]
    assert "disk is full" not in said[1] and ", and a checkpoint takes 5e-09 GB" in said[1]


def test_last_step_already_saved_is_not_saved_again(saver, checkpoints):
    made = saver()
    steps(made, 1, 5)
    assert made.last(5) and checkpoints.calls.count("save 5") == 1
    made.resumed_at(10)
    assert made.last(10) and "save 10" not in checkpoints.calls


def test_rewind_goes_to_the_save_under_way(saver, checkpoints):
    checkpoints.steps_to_write = 100
    made = saver()
    steps(made, 1, 6)
    assert checkpoints.published == [] and made.settled() == 5


def test_a_failed_save_names_the_newest_checkpoint(saver, checkpoints, said, naps):
    made = saver()
    for step in (5, 10):
        checkpoints.fail_to_begin = [SaveError("the disk is full")]
        assert made.last(step)  # at the second attempt
        checkpoints.fail_to_begin = []
    assert "there is none before it" in said[0] and said[1] == "saved step 5"
    assert "the one of step 5 stays" in said[2] and said[3] == "saved step 10"
