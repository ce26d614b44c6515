"""Every operation of a save fails in turn: the ranks agree, say so in one line, and the next save works."""

from collections import Counter

import pytest

from tests.checkpoint.failing_saves_probe import FAULTS
from tests.runtime.ranks import run_script

pytestmark = pytest.mark.xdist_group("failing_saves")
REFUSED = "a checkpoint could not be saved (step "


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    """What both ranks saw of each save; the last one had no fault."""
    answer = run_script("tests.checkpoint.failing_saves_probe", str(tmp_path_factory.mktemp("saves")))
    assert answer["failed"] == []
    return answer["ranks"]


def test_every_operation_fails_on_every_rank(saves):
    faults = [save["fault"] for save in saves[0][:-1]]
    assert {(how, rank) for how, rank, *_ in faults} == {(how, rank) for how in FAULTS for rank in (0, 1)}
    assert len(faults) > 100 and max(number for _, _, number, _ in faults) > 50


def test_ranks_agree_how_each_save_ended(saves):
    for mine, theirs in zip(*saves, strict=True):
        assert mine["steps"] == theirs["steps"]
        assert [line for line in mine["said"] if "old checkpoints" not in line] == theirs["said"], mine["fault"]


def test_failed_save_is_reported_in_one_line(saves):
    for save in saves[0]:
        ends = [line for line in save["said"] if "old checkpoints could not be removed" not in line]
        assert len(ends) == 1 and "\n" not in ends[0]
        assert ends[0] == f"saved step {save['step']}" or ends[0].startswith(f"{REFUSED}{save['step']}: "), save[
            "fault"
        ]


def test_saves_fail_where_they_should(saves):
    outcomes = Counter((save["fault"][0], save["said"][-1].startswith("saved")) for save in saves[0][:-1])
    assert all(outcomes[how, False] for how in FAULTS), outcomes
    assert not outcomes["killed", True]


def test_no_fault_costs_older_checkpoints(saves):
    """`saves` verified every checkpoint on disk after each fault."""
    for before, after in zip(saves[0], saves[0][1:], strict=False):
        if after.get("fault", ["removed"])[0] != "removed" and before["steps"]:
            assert after["steps"] and after["steps"][-1] >= before["steps"][-1]


def test_save_after_all_faults_works(saves):
    last = saves[0][-1]
    assert last["said"] == [f"saved step {last['step']}"] and last["newest"] == last["step"]
