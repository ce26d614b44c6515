"""Scripts of the tests that are forked from a process with the imports behind it."""

import fcntl

import pytest

from tests.runtime.ranks import fork_script
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("world")  # where such a process runs anyway
PROBE = "tests.runtime.warm_probe"


def test_failed_script_shows_its_exit_code_and_errors():
    with pytest.raises(AssertionError, match=r"fail failed with exit code 3:(.|\n)*what went wrong"):
        fork_script(PROBE, "fail")


def test_every_script_gets_its_own_environment(monkeypatch):
    for value in ("one", "two"):
        monkeypatch.setenv("OF_THIS_TEST", value)
        assert fork_script(PROBE, "environment") == value
    monkeypatch.delenv("OF_THIS_TEST")
    assert fork_script(PROBE, "environment") is None


def test_children_that_a_script_leaves_are_ended(tmp_path):
    file = tmp_path / "held"
    file.touch()
    fork_script(PROBE, "stray", str(file))
    with open(file) as held:
        wait_until(lambda: can_lock(held), seconds=120)


def can_lock(file):
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
