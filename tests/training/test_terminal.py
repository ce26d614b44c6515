"""A run whose terminal is closed."""

import os
import pty
import signal
import sys
import time

import pytest

from megatron_blackmamba.formats.run_folder import RunFolder
from tests.thorough import thorough

TRAIN = [sys.executable, "-m", "megatron_blackmamba", "train", "tiny", "training.tokens=1e9", "checkpoint.every=0"]

pytestmark = pytest.mark.xdist_group("command")


def steps(run):
    return run.metrics.read_bytes().count(b"\n") if run.metrics.exists() else 0


def started_in_a_terminal(words, run):
    """Return a process that is taking steps, and its terminal."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(run.root.parent)  # where nohup writes its output
        os.execvp(words[0], [*words, f"folder={run.root.parent}"])
    os.set_blocking(terminal, False)
    while steps(run) < 3:
        assert os.waitpid(process, os.WNOHANG) == (0, 0), "training ended early"
        try:  # a full terminal would stop the process
            os.read(terminal, 1 << 16)
        except OSError:
            time.sleep(0.05)
    return process, terminal


def test_closed_terminal_saves_the_run(tmp_path):
    run = RunFolder(tmp_path / "tiny")
    process, terminal = started_in_a_terminal(TRAIN, run)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 75
    assert run.latest.read_text().strip() == f"step_{steps(run):08}"


@thorough
def test_nohup_keeps_all_processes_training(tmp_path):
    run = RunFolder(tmp_path / "tiny")
    process, terminal = started_in_a_terminal(["nohup", *TRAIN, "--nproc", "2", "parallel.expert=2"], run)
    os.close(terminal)
    before = steps(run)
    while steps(run) < before + 20:
        assert os.waitpid(process, os.WNOHANG) == (0, 0), "training ended with the terminal"
        time.sleep(0.05)
    os.kill(process, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 75
