import ast
import os
import signal

from megatron_blackmamba.runtime import signals
from tests.runtime.ranks import ROOT, run

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


FOLDERS = ("megatron_blackmamba", "data_tools", "scripts", "benchmarks", "tests")
MUST_NOT = {"print", "say", "_say", "write", "flush", "info", "warning", "error", "debug", "acquire", "wait", "join"}
"""A handler runs inside whatever the main thread does, which may be a print or a wait for the same lock."""


def called(node):
    """Return the names of the functions and methods that a piece of code calls, without os's."""
    calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
    of_os = lambda call: isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name) and call.value.id == "os"
    return {getattr(call, "attr", getattr(call, "id", "")) for call in calls if not of_os(call)}


def handlers(tree):
    """Yield the second argument of each `signal.signal`."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "signal.signal":
            yield call.args[1]


def forbidden_in_handlers(text):
    """Return what handlers call that they must not, themselves or by functions of their file."""
    tree, found = ast.parse(text), set()
    functions = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, []).append(node)
    for handler in handlers(tree):
        waiting = [handler, *functions.get(getattr(handler, "attr", getattr(handler, "id", "")), [])]
        seen = set()
        while waiting:
            calls = called(waiting.pop())
            found |= calls & MUST_NOT
            waiting += [each for name in calls - seen - MUST_NOT for each in functions.get(name, [])]
            seen |= calls
    return found


def test_no_signal_handler_prints_or_waits():
    assert forbidden_in_handlers("def _stop(*_):\n    self.say('x')\nsignal.signal(2, self._stop)") == {"say"}
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found = {path.name: calls for path in files if (calls := forbidden_in_handlers(path.read_text()))}
    found.pop("interrupts.py")  # its handler means to stop here for ever, and its `say` calls os.write
    assert not found
