"""Files of a run folder that disappear while the run trains: scratch file systems remove what is old."""

import os
import shutil

import pytest

from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.training.keep.lock import Lock
from megatron_blackmamba.training.record.line_file import LineFile
from tests.training.runs import SMALL, log, metrics
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("forks")


@pytest.fixture
def waiting(forks, tmp_path):
    """A run that waits after its third step, and the path of its folder."""
    job = forks.run(tmp_path, [*SMALL, "training.stop_after_steps=8", "checkpoint.every=4"], until=3)
    run = RunFolder(tmp_path / "run")
    wait_until(lambda: run.metrics.exists() and len(metrics(tmp_path)) == 3, job)
    yield job, run
    job.kill()


def test_removed_run_folder_is_made_again(waiting, tmp_path):
    job, run = waiting
    config, plan = run.config.read_bytes(), run.data_plan.read_bytes()
    while run.root.exists():  # a saving process may write into it at the same time
        shutil.rmtree(run.root, ignore_errors=True)
    job.go_on()
    assert job.wait() == [0, 0], job.output()
    assert (run.config.read_bytes(), run.data_plan.read_bytes()) == (config, plan)
    assert [record["step"] for record in metrics(tmp_path)] == [4, 5, 6, 7, 8]
    assert "metrics.jsonl: was removed, with its earlier lines" in log(tmp_path)
    assert "lock, config.yaml, data_plan.json had been removed and is written again" in log(tmp_path)
    assert run.lock.exists() and run.checkpoint(8).is_dir()


def test_renamed_run_folder_is_continued_under_its_name(waiting, forks, tmp_path):
    job, run = waiting
    moved = run.root.rename(tmp_path / "moved")
    job.go_on()
    assert job.wait() == [0, 0], job.output()
    assert [record["step"] for record in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6, 7, 8]
    said = log(tmp_path)
    assert f"metrics.jsonl: was moved to {moved}/metrics.jsonl; its lines are copied" in said
    assert "step 1 " in said and run.events.read_text().count('"started"') == 1
    assert "lock, config.yaml, data_plan.json had been removed and is written again" in said
    assert run.config.exists() and run.checkpoint(8).is_dir()
    again = forks.run(tmp_path, [*SMALL, "training.stop_after_steps=9"])
    assert again.wait() == [0, 0], again.output()
    assert [record["step"] for record in metrics(tmp_path)] == [*range(1, 10)]
    assert len((moved / "metrics.jsonl").read_text().splitlines()) == 3


def test_lines_that_cannot_be_copied_wait(tmp_path):
    said = []
    lines = LineFile(tmp_path / "x" / "lines", said.append)
    lines.write("one")
    (tmp_path / "x").rename(tmp_path / "y")
    (tmp_path / "x").touch()  # where its folder was
    lines.write("two")
    assert lines.waiting == [b"two\n"] and not said
    (tmp_path / "x").unlink()
    assert lines.close() is None and (tmp_path / "x" / "lines").read_text() == "one\ntwo\n"
    assert said == [
        f"{tmp_path}/x/lines: was moved to {tmp_path}/y/lines; its lines are copied, and the next ones follow here"
    ]


def test_run_whose_folder_another_took_stops(waiting):
    job, run = waiting
    run.lock.unlink()
    other = Lock(run.lock)
    try:
        job.go_on()
        assert 1 in job.wait(), job.output()
    finally:
        other.release()
    assert f"{run.root} is in use by process" in job.output()
    assert not run.latest.exists()


def test_lines_continue_in_new_file_after_a_removal(tmp_path):
    said = []
    lines = LineFile(tmp_path / "x" / "lines", said.append)
    lines.write("one")
    shutil.rmtree(tmp_path / "x")
    opened = os.listdir("/proc/self/fd")
    lines.write("two")
    assert os.listdir("/proc/self/fd") == opened  # the removed file gives its space back
    lines.write("three")
    assert lines.close() is None and (tmp_path / "x" / "lines").read_text() == "two\nthree\n"
    assert said == [f"{tmp_path}/x/lines: was removed, with its earlier lines; a new file takes the next ones"]
