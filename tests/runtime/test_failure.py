"""The output of failing ranks."""

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

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


@pytest.fixture
def last_words(monkeypatch, capsys):
    """Return what a rank does with an exception, in order: pauses, lines on stderr and its exit code."""

    def end(error, size=4):
        done = []

        def pause(seconds):
            done.append(capsys.readouterr().err)
            done.append(seconds)

        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        monkeypatch.setattr(sys, "__stderr__", sys.stderr)
        monkeypatch.setattr(failure.time, "sleep", pause)
        monkeypatch.setattr(failure.os, "_exit", lambda code: done.append(code))
        failure.report_as(1, size)
        sys.excepthook(type(error), error, None)
        return [capsys.readouterr().err if part is None else part for part in [*done[:-1], None, done[-1]]]

    return end


def test_lost_ranks_wait_before_they_speak(last_words):
    before, pause, said, code = last_words(ConnectionError("Connection closed by peer"))
    assert before == "" and pause == failure.LET_THE_CAUSE_SPEAK
    assert said == "rank 1 of 4 lost another rank:\nConnectionError: Connection closed by peer\n"
    assert code == 1


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("cannot open the socket of the tokenizer service"),
        dist.DistBackendError("NCCL error: invalid usage. Duplicate GPU detected: rank 0 and rank 1"),
        dist.DistBackendError("NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'"),
    ],
)
def test_own_failures_are_no_lost_ranks(last_words, error):
    said, code = last_words(error)
    assert said.startswith("rank 1 of 4 failed:\n") and said.endswith(f"{error}\n") and code == 1


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2"),
        RuntimeError("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?"),
        dist.DistBackendError("ncclRemoteError: A call failed possibly due to a network error or a remote process"),
        dist.DistBackendError("[1] is setting up NCCL communicator, but store->get('0') got error: Broken pipe"),
    ],
)
def test_errors_of_a_lost_rank_are_known(error):
    assert failure._is_consequence(error)


def test_a_process_alone_has_lost_no_rank(last_words):
    said, code = last_words(ConnectionError("Connection closed by peer"), size=1)
    assert said.endswith("ConnectionError: Connection closed by peer\n") and code == 1


def test_a_rank_alone_gives_a_plain_traceback(last_words):
    said, code = last_words(KeyboardInterrupt(), size=1)
    assert said == "KeyboardInterrupt\n" and code == 130
