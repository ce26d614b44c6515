"""`blackmamba train … --nproc 2` as a person types it, on a terminal."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_blackmamba.formats.run_folder import RunFolder
from tests.training.runs import losses
from tests.waiting import Command, wait_until

ROOT = Path(__file__).resolve().parents[2]


class Terminal:
    """A command on a terminal of its own, and everything it showed there."""

    def __init__(self, *command, environment=os.environ):
        ours, theirs = pty.openpty()
        environment = {**environment, "COLUMNS": "120", "LINES": "40", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self._shown = b""
        self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._reader.start()

    def _read(self, ours):
        try:
            while data := os.read(ours, 1 << 16):
                self._shown += data
        except OSError:  # the other end is closed
            os.close(ours)

    def wait(self):
        code = self.process.wait(900)
        self._reader.join(120)
        return code

    @property
    def shown(self):
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._shown.decode(errors="replace"))


@pytest.fixture
def train(tmp_path):
    started = []

    def start(*more, session=None):
        """session: it forks the processes, and none of them has to import anything."""
        python = session.bin / "run-python" if session else sys.executable
        environment = session.environment if session else os.environ
        command = [python, "-m", "megatron_blackmamba", "train", "configs/run/tiny.yaml", "--nproc", "2"]
        settings = [f"folder={tmp_path}", "name=run", "parallel.expert=2", "training.evaluate_batches=1"]
        started.append(Terminal(*command, *settings, *more, environment=environment))
        return started[-1]

    yield start
    for terminal in started:
        if terminal.process.poll() is None:
            os.killpg(terminal.process.pid, signal.SIGKILL)


@pytest.mark.xdist_group("pages")
def test_tiny_run_stops_and_resumes_on_two_processes(train, session, tmp_path):
    run = RunFolder(tmp_path / "run")
    terminal = train("model.router.scope=data")
    wait_until(lambda: len(losses(tmp_path)) >= 30, Command(terminal.process, lambda: terminal.shown))
    terminal.process.send_signal(signal.SIGUSR1)
    assert terminal.wait() == 75, terminal.shown
    assert run.requeue.exists()
    stopped = len(losses(tmp_path))
    for wanted in (
        "run: 0.5M parameters",
        "2 processes in fp32",
        "/200",
        "tokens/s",
        "Learning rate",
        "Gradient norm",
        "Samples by source",
        "ETA",
        "stops on request",
        "note: model.router.scope=data balances",
    ):
        assert wanted in terminal.shown, terminal.shown
    assert "Warning" not in terminal.shown and "Traceback" not in terminal.shown

    terminal = train("model.router.scope=data", f"training.stop_after_steps={stopped + 3}", session=session)
    assert terminal.wait() == 0, terminal.shown
    assert f"resumes after step {stopped}" in terminal.shown and not run.done.exists()  # tokens are left
    curve = losses(tmp_path)
    assert len(curve) == stopped + 3 and sum(curve[-5:]) < 0.6 * sum(curve[:5])


def test_invalid_run_is_refused_in_one_line(train):
    terminal = train("training.global_batch=15", "training.micro_batch=5")
    assert terminal.wait() == 2
    assert "training.global_batch=15" in terminal.shown and "Traceback" not in terminal.shown


def test_a_refusal_of_all_ranks_is_printed_once(train, tmp_path):
    terminal = train(f"start.from={tmp_path}/nowhere")
    assert terminal.wait() == 2, terminal.shown
    assert terminal.shown.count("nowhere") == 1, terminal.shown
