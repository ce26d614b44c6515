"""Every operation of a save fails in turn: the ranks agree, say so in one line, and the next save works."""

import re
from collections import Counter

import pytest

from tests.checkpoint.failing_saves_probe import FAULTS
from tests.runtime.ranks import fork_script
from tests.small_disk import small_disk
from tests.thorough import thorough

pytestmark = [pytest.mark.xdist_group("failing_saves"), thorough]
REFUSED = "a checkpoint could not be saved (step "


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """The probe's answer, on a small file system of its own where one can be mounted."""
    folder = tmp_path_factory.mktemp("saves")
    with small_disk(folder, 64 * 2**20, required=False):
        answer = fork_script("tests.checkpoint.failing_saves_probe", str(folder))
    assert answer["failed"] == []
    return answer


@pytest.fixture(scope="module")
def saves(answer):
    """Return what both ranks reported about each save; the last one had no fault."""
    return answer["ranks"]


def said(save):
    """Return how a save ended; what rank 0 removes and the free space at that moment are a rank's own."""
    lines = [line for line in save["said"] if "old checkpoints" not in line]
    figures = r"(the disk is full: )?[\d.e-]+ GB free|, and a checkpoint takes [\d.e-]+ GB"
    return [re.sub(figures, "", line) for line in lines]


def test_every_operation_fails_on_every_rank(saves):
    faults = [save["fault"] for save in saves[0][:-1]]
    assert {(how, rank) for how, rank, *_ in faults} == {(how, rank) for how in FAULTS for rank in (0, 1)}
    assert len(faults) > 100 and max(number for _, _, number, _ in faults) > 50


def test_ranks_agree_how_each_save_ended(saves):
    for mine, theirs in zip(*saves, strict=True):
        assert mine["steps"] == theirs["steps"]
        assert said(mine) == said(theirs), mine["fault"]


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


def test_file_system_that_fills_up_costs_only_save(answer):
    mine, theirs = answer["full"]
    if not mine:
        pytest.skip("no small file system can be mounted here")
    assert [said(save) for save in mine] == [said(save) for save in theirs]
    assert [save["steps"] for save in mine] == [save["steps"] for save in theirs]
    ended = [save["said"][-1].startswith("saved") for save in mine]
    assert ended[0] and not any(ended[1:]), mine
    assert all(save["steps"] == mine[0]["steps"] for save in mine)
    for save in mine[2:]:  # the first that fails has space for the tensors, but not for all other files
        assert re.search("the disk is full: .* GB free in .*, and a checkpoint takes .* GB", save["said"][-1]), save


def test_save_after_all_faults_works(saves):
    last = saves[0][-1]
    assert last["said"] == [f"saved step {last['step']}"] and last["newest"] == last["step"]


def test_an_unreadable_folder_ends_every_rank(saves):
    assert [rank[-1]["refusal"] for rank in saves] == ["Permission denied"] * 2


def test_each_rank_holds_only_its_part_of_optimizer(saves):
    mine, theirs = (rank[-1]["elements"] for rank in saves)
    for what in ("to save", "to load"):
        assert mine[what] + theirs[what] == mine["all"] == theirs["all"] > 0, what
        assert 0 < mine[what] < mine["all"]
