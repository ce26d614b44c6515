"""Nothing outlives a launcher that is killed, least of all a process that writes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.ranks import ROOT, environment
from tests.waiting import Command, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")


def processes(folder):
    """Ids of the processes that work for this folder; forks have the command line of their parent."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it just ended
            continue
    return found


def test_killed_launcher_leaves_no_writer_behind(tmp_path):
    command = [sys.executable, "-m", "tests.training.slow_save", str(tmp_path)]
    launcher = subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True)
    written = tmp_path / "written"
    try:
        wait_until(
            lambda: written.exists() and len(processes(tmp_path)) == 3, Command(launcher)
        )  # the writer is at work
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
        wait_until(lambda: not processes(tmp_path))
        size = written.stat().st_size
        time.sleep(0.3)
        assert written.stat().st_size == size
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [".step_00000001"]
    finally:
        for pid in processes(tmp_path):
            os.kill(pid, signal.SIGKILL)
