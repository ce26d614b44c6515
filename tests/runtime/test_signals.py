import os
import signal
import subprocess
import sys
import threading

import pytest

from megatron_blackmamba.runtime import signals
from tests.runtime.ranks import ROOT, environment

HANGS = """
import time
from megatron_blackmamba.runtime.signals import Watchdog
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
from megatron_blackmamba.runtime.signals import Watchdog
hangs.patience = lambda seconds: 0
def stuck_with_the_lock():
    ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the lock, CDLL would release it
with Watchdog(4, rank=3) as dog:
    for _ in range(30):  # its thread looks once a second
        dog.alive("starting"); time.sleep(0.05)
    stuck_with_the_lock()
"""
ASKED_TWICE = """
import os, signal, sys
from megatron_blackmamba.runtime.signals import StopRequest
signal.signal(signal.SIGINT, signal.SIG_DFL)
how = signal.Signals[sys.argv[1]]
stop = StopRequest(catch=(how,))
os.kill(os.getpid(), how); assert stop.asked
os.kill(os.getpid(), how); print("still here")
"""


def run(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_each_sign_of_life_counts_anew():
    with signals.Watchdog(10_000) as dog:
        dog._since -= 5_000
        assert dog._silent >= 5_000
        dog.alive("step 7")
        assert dog._silent < 5_000


@pytest.mark.parametrize(("ranks", "beating"), [(1, set()), (2, {"heartbeat"})])
def test_only_several_ranks_leave_heartbeats(tmp_path, ranks, beating):
    before = set(threading.enumerate())
    with signals.Watchdog(10_000, size=ranks, logs=tmp_path):
        new = {thread.name for thread in set(threading.enumerate()) - before}
    assert new & {"watchdog", "heartbeat"} == {"watchdog"} | beating


def test_hung_process_exits_and_says_where():
    done = run(HANGS)
    assert done.returncode == signals.HUNG
    assert "rank 3 hangs" in done.stderr
    assert "'step 3'" in done.stderr
    assert "stuck_in_a_collective" in done.stderr


def test_hang_that_keeps_the_gil_is_ended():
    done = run(KEEPS_PYTHON_S_LOCK)
    assert done.returncode == 1  # by faulthandler, which cannot choose
    assert "stuck_with_the_lock" in done.stderr


def test_ended_watchdog_cancels_its_timer(monkeypatch):
    """Or else faulthandler ends a process that has long done its work."""
    calls = []
    monkeypatch.setattr(signals.faulthandler, "dump_traceback_later", lambda *_, **__: calls.append("set"))
    monkeypatch.setattr(signals.faulthandler, "cancel_dump_traceback_later", lambda: calls.append("cancelled"))
    with signals.Watchdog(600):
        pass
    assert calls[-1] == "cancelled"


def test_a_second_interrupt_ends_the_process_at_once():
    done = run(ASKED_TWICE, "SIGINT")
    assert done.returncode == -signal.SIGINT
    assert "still here" not in done.stdout


def test_a_job_script_may_repeat_its_request():
    done = run(ASKED_TWICE, "SIGTERM")
    assert done.returncode == 0
    assert "still here" in done.stdout


def test_signal_sets_the_flag_and_exit_restores_handlers():
    before = signal.getsignal(signal.SIGUSR1)
    stop = signals.StopRequest(catch=(signal.SIGUSR1,))
    assert not stop.asked
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.asked
    assert stop.received is signal.SIGUSR1
    stop.release()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_held_signals_stay_pending():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signals.hold()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before | {signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
