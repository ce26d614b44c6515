import os
import signal

from megatron_blackmamba.runtime import signals
from tests.runtime.ranks import run

ASKED_TWICE = """
import os, signal, sys
from megatron_blackmamba.runtime.signals import StopRequest
signal.signal(signal.SIGINT, signal.SIG_DFL)
how = signal.Signals[sys.argv[1]]
stop = StopRequest(catch=(how,))
os.kill(os.getpid(), how); assert stop.asked
os.kill(os.getpid(), how); print("still here")
"""


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
