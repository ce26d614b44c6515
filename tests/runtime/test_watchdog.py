import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from megatron_blackmamba.runtime import watchdog
from megatron_blackmamba.runtime.exits import HUNG
from tests.runtime.ranks import ROOT, environment, run

HANGS = """
import time
from megatron_blackmamba.runtime.watchdog import Watchdog
with Watchdog(3, rank=3) as dog:
    for step in range(4):
        dog.alive(f"step {step}")
    def stuck_in_a_collective():
        time.sleep(600)
    stuck_in_a_collective()
"""
KEEPS_PYTHON_S_LOCK = """
import ctypes, time
from megatron_blackmamba.runtime import hangs
from megatron_blackmamba.runtime.watchdog import Watchdog
hangs.patience = lambda seconds: 0
def stuck_with_the_lock():
    mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock  # CDLL would release Python's
    lock(mutex), lock(mutex)  # waits for itself; a sleep would end with the first signal
with Watchdog(4, rank=3) as dog:
    for _ in range(30):  # its thread looks once a second
        dog.alive("starting"); time.sleep(0.05)
    stuck_with_the_lock()
"""


def test_each_sign_of_life_counts_anew():
    with watchdog.Watchdog(10_000) as dog:
        dog._awake += 5_000
        assert dog._silent >= 5_000
        dog.alive("step 7")
        assert dog._silent < 5_000


@pytest.mark.parametrize(("ranks", "beating"), [(1, set()), (2, {"heartbeat"})])
def test_only_several_ranks_leave_heartbeats(tmp_path, ranks, beating):
    before = set(threading.enumerate())
    with watchdog.Watchdog(10_000, size=ranks, logs=tmp_path):
        new = {thread.name for thread in set(threading.enumerate()) - before}
    assert new & {"watchdog", "heartbeat"} == {"watchdog"} | beating


def test_hung_process_exits_and_says_where():
    done = run(HANGS)
    assert done.returncode == HUNG
    assert "rank 3 hangs" in done.stderr
    assert "'step 3'" in done.stderr
    assert "stuck_in_a_collective" in done.stderr


def test_hang_that_keeps_the_gil_is_ended():
    done = run(KEEPS_PYTHON_S_LOCK)
    assert done.returncode == -signal.SIGKILL
    assert "stuck_with_the_lock" in done.stderr


def test_ended_watchdog_leaves_no_process():
    """Or else it ends a process that has long done its work."""
    with watchdog.Watchdog(600) as dog:
        process = dog._deadman._process
        assert process.poll() is None
    assert process.poll() is not None


STOPPED = """
import os, sys, time
from megatron_blackmamba.runtime.watchdog import Watchdog
with Watchdog(2) as dog:
    dog.alive("step 1")
    print("ready", flush=True)
    sys.stdin.readline()
    dog.alive("step 2")
    for _ in range(12):
        time.sleep(0.25)
        dog.alive("step 2")
"""


def test_stopped_process_does_not_count_as_a_hang():
    """As by `scontrol suspend`: longer than all limits of the watchdog and the deadman together, 7 s."""
    command = [sys.executable, "-c", STOPPED]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(), cwd=ROOT, **options) as process:
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(9)
        os.kill(process.pid, signal.SIGCONT)
        _, said = process.communicate("go on\n")
    assert process.returncode == 0 and said == ""
