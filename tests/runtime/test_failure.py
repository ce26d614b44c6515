"""What ranks print that fail."""

import os
import sys
from pathlib import Path

import pytest

from megatron_blackmamba.runtime import failure


@pytest.fixture
def said(tmp_path, monkeypatch):
    (tmp_path / "said").touch()
    monkeypatch.setenv(failure.SAID, str(tmp_path / "said"))


def fail(rank: int, error: Exception, output: Path) -> int:
    """Let a forked rank end with this error; return its exit code."""
    pid = os.fork()
    if not pid:
        sys.__stderr__ = open(output, "a")  # noqa: SIM115
        failure.report_as(rank, 2)
        try:
            raise error
        except Exception:
            sys.excepthook(*sys.exc_info())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_an_error_that_ranks_share_is_printed_once(said, tmp_path):
    output = tmp_path / "output"
    errors = [ValueError("the disk is full"), ValueError("the disk is full"), ValueError("something else")]
    assert [fail(rank, error, output) for rank, error in enumerate(errors)] == [1, 1, 1]
    text = output.read_text()
    assert text.count("ValueError: the disk is full") == 1 and text.count("ValueError: something else") == 1
    assert "rank 0 of 2 failed:" in text and "rank 1 of 2 failed in the same way" in text


def test_ranks_with_logs_of_their_own_all_print(tmp_path, monkeypatch):
    monkeypatch.delenv(failure.SAID, raising=False)
    said = []
    for _ in range(2):
        assert failure.say_once("an error", lambda: said.append("an error"))
    assert len(said) == 2
