"""Ranks that stay slow are named."""

import socket

import pytest

from megatron_blackmamba.formats.events import SlowRank
from megatron_blackmamba.settings import GuardConfig
from megatron_blackmamba.training.watch.ranks import Ranks
from megatron_blackmamba.training.watch.stragglers import Slowest, Stragglers, slowest
from tests.training.runs import ON_TWO, events_of, log, metrics

NOTHING = [0.0] * 4


def stragglers(steps=10, ratio=1.5):
    return Stragglers(GuardConfig(slow_steps=steps, slow_ratio=ratio), Ranks(["a", "a", "b", "b"]))


def said(found, steps, computing, reading=NOTHING):
    return [event.sentence for _ in range(steps) for event in found.after_step(computing, reading, 1.0)]


def test_slow_rank_is_named_once_until_it_recovers():
    found = stragglers()
    slow = [1.0, 1.0, 2.0, 1.1]
    first = said(found, 10, slow)
    assert len(first) == 1 and first[0].startswith("rank 2 (b) is slow: its layers take 2.00 times as long")
    assert said(found, 10, slow) == []
    assert said(found, 10, [1.0] * 4) == ["rank 2 (b) is no longer slow"]
    assert said(found, 10, [1.0] * 4) == []


def test_a_few_slow_steps_name_nobody():
    found = stragglers()
    assert said(found, 4, [9.0, 1.0, 1.0, 1.0]) + said(found, 6, [1.0] * 4) == []


def test_a_rank_that_waits_for_data_is_named():
    (line,) = said(stragglers(), 10, [1.0] * 4, [0.0, 0.6, 0.0, 0.01])
    assert line.startswith("rank 1 (a) is slow: it waits 0.590 s a step longer for data")


def test_the_slowest_rank_is_measured_against_the_others():
    assert slowest([1.0, 3.0, 1.0, 2.0]) == Slowest(1, 3.0)
    assert slowest([2.0, 1.0]) == Slowest(0, 2.0)
    assert slowest([1.0]) is None and slowest([0.0, 1.0]) is None


@pytest.mark.xdist_group("forks")
def test_slow_rank_is_named_in_log_and_events(forks, tmp_path):
    watched = ["training.guard.slow_steps=4", "training.guard.slow_ratio=4", "training.stop_after_steps=5"]
    job = forks.run(tmp_path, [*ON_TWO, *watched], trainer="SlowLayer")
    assert job.wait() == [0, 0], job.output()
    assert f"rank 1 ({socket.gethostname()}) is slow: its layers take" in log(tmp_path)
    first = events_of(tmp_path, SlowRank)[0]
    assert (first.step, first.rank, first.host) == (4, 1, socket.gethostname()) and first.over_median == 11
    records = metrics(tmp_path)
    assert {record["speed/slowest_rank"] for record in records} == {1}
    assert {record["speed/slowest_over_median"] for record in records} == {11}
