"""Traces of some steps (training.profile): whatever cuts or breaks them, the run goes on."""

from itertools import count

import pytest

from megatron_blackmamba.config import load
from megatron_blackmamba.formats.events import LoggingProblem, Traced
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.training.record import journal
from megatron_blackmamba.training.record.tracing import Tracing


def take(tracing, steps):
    """Take steps, and return what was said of them."""
    said = [event for step in steps for event in (tracing.before(step), tracing.after(step))]
    return [event for event in said if event]


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_requested_steps_are_traced(tmp_path):
    (traced,) = take(Tracing((2, 3), tmp_path, 1), range(1, 5))
    assert isinstance(traced, Traced) and (traced.first, traced.last) == (2, 3)
    assert files(tmp_path) == ["steps_2_3_rank_1.json.gz"]


def test_resume_traces_the_steps_left(tmp_path):
    stopped = Tracing((2, 5), tmp_path, 0)
    assert not take(stopped, [1, 2, 3])
    assert stopped.end(3) and stopped.end(3) is None
    take(Tracing((2, 5), tmp_path, 0), [4, 5, 6])
    assert files(tmp_path) == ["steps_2_3_rank_0.json.gz", "steps_4_5_rank_0.json.gz"]


def test_a_rewind_is_part_of_its_trace(tmp_path):
    assert len(take(Tracing((2, 4), tmp_path, 0), [1, 2, 3, 2, 3, 4, 5])) == 1
    assert files(tmp_path) == ["steps_2_4_rank_0.json.gz"]


@pytest.mark.parametrize("rank", [0, 1])
def test_trace_without_a_place_costs_no_step(tmp_path, capfd, rank):
    (tmp_path / "profile").touch()
    (problem,) = take(Tracing((1, 2), tmp_path / "profile", rank), [1, 2, 1, 2])
    assert isinstance(problem, LoggingProblem) and f"rank {rank} has no trace: " in problem.problem
    assert (problem.problem in capfd.readouterr().err) == (rank > 0)  # which has no other place to say it


def test_step_s_time_is_without_its_trace(tmp_path, monkeypatch):
    ticks = count()
    monkeypatch.setattr(journal.time, "perf_counter", lambda: next(ticks))
    kept = journal.Journal(load("tiny", ["logging.tensorboard=false"]), RunFolder(tmp_path), rank=1)
    monkeypatch.setattr(kept._tracing, "before", lambda step: next(ticks) and None)
    monkeypatch.setattr(kept._tracing, "after", lambda step: next(ticks) and None)
    kept.step_begins(1)
    assert kept.step_ends(1) == 1
