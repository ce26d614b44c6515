"""Ctrl-C ends every command at any moment with one line, code 130 and nothing half-made."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from megatron_blackmamba import cli
from tests.cli.test_cli import commands
from tests.interruptions import CASES, Case, interrupt
from tests.runtime.ranks import ROOT, environment
from tests.waiting import wait_until

LINE = "blackmamba: interrupted\n"
BEGIN = """
import os, pathlib, signal, subprocess, time
from megatron_blackmamba.console import interrupts
if __name__ == "__main__":
    interrupts.watch()
def ready(*said):
    print("ready", *said, flush=True)
"""
IN_C = "import ctypes; ready(); ctypes.CDLL(None).sleep(600)"
SWALLOWS = """
ready()
while True:
    try:
        time.sleep(600)
    except BaseException:
        pass
"""
SPAWNS = """
import multiprocessing
def serve(pipe):
    pipe.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())); pipe.recv()
if __name__ == "__main__":
    context = interrupts.spawn_context()
    ours, theirs = context.Pipe()
    lock = context.Lock()  # its name is removed afterwards, by a process of Python's
    context.Process(target=serve, args=(theirs,)).start()
    blocked = ours.recv()
    ready(lock._semlock.name if blocked else "it takes interrupts"); ours.recv()
"""
HAS_FILES = """
from megatron_blackmamba.formats import atomic
with interrupts.unfinished("folder"), atomic.atomic_file("file") as file:
    file.write(b"half")
    os.mkdir("folder")
    child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE)
    ready(int(child.stdout.readline()))
    child.wait()
    os.mkdir("another")
"""
HOLDS = """
from megatron_blackmamba.runtime.signals import hold
hold(); ready(); time.sleep(1); print("alive")
"""
OWN_HANDLER = """
def handle(*_):
    os.write(1, b"handled\\n"); os._exit(3)  # a print would fail inside the one of `ready`
signal.signal(signal.SIGINT, handle)
ready()
for _ in range(6000):
    time.sleep(0.1)
"""


def start(folder: Path, code: str) -> subprocess.Popen:
    """Start a program that watches for interrupts, in a process group of its own."""
    (folder / "program.py").write_text(BEGIN + code)
    return subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=folder,
        env=environment(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )


def wait_for(process: subprocess.Popen) -> str:
    """Wait until the program is ready; return what it says."""
    word, _, said = process.stdout.readline().strip().partition(" ")
    assert word == "ready", process.communicate()
    return said


def interrupted(process: subprocess.Popen) -> tuple[int, str]:
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


@pytest.mark.parametrize("code", [IN_C, SWALLOWS], ids=["in C", "swallowed"])
def test_an_interrupt_ends_whatever_runs(tmp_path, code):
    process = start(tmp_path, code)
    wait_for(process)
    assert interrupted(process) == (130, LINE)


def test_an_interrupt_ends_workers_and_their_semaphores(tmp_path):
    process = start(tmp_path, SPAWNS)
    name = wait_for(process).strip("/")
    assert interrupted(process) == (130, LINE)
    wait_until(lambda: not Path(f"/dev/shm/sem.{name}").exists())


def test_an_interrupt_removes_files_and_ends_descendants(tmp_path):
    """The main thread sees its child end: it must neither publish the file nor make more."""
    process = start(tmp_path, HAS_FILES)
    grandchild = int(wait_for(process))
    assert len(list(tmp_path.iterdir())) == 3
    assert interrupted(process) == (130, LINE)
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]
    wait_until(lambda: not Path(f"/proc/{grandchild}").exists())


def test_a_handler_of_the_program_is_called_instead(tmp_path):
    process = start(tmp_path, OWN_HANDLER)
    wait_for(process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=120)[0] == "handled\n" and process.returncode == 3


def test_other_signals_are_not_taken_by_watching_thread(tmp_path):
    """A thread that does not block SIGTERM would let it end a run that is still importing."""
    process = start(tmp_path, HOLDS)
    wait_for(process)
    process.terminate()
    assert process.communicate(timeout=120)[0] == "alive\n"


def test_an_ignored_interrupt_stays_ignored():
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_blackmamba", "config", "tiny"],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    assert process.returncode == 0 and process.communicate()[1] == b""


def test_every_command_is_among_those_interrupted():
    leaves = {" ".join(words) for words in commands(typer.main.get_command(cli.app)) if words}
    groups = {"data", "export", "import"}
    assert {name.partition(" --")[0] for name in CASES} == leaves - groups


@pytest.mark.parametrize(
    ("words", "longest"),
    [("config tiny", 0.8), ("new mine", 0.8), ("train tiny folder=runs name=mine", 3), ("doctor", 3)],
)
def test_commands_interrupted_at_random_moments(words, longest, tmp_path):
    """`python -m tests.interruptions` does it for every command, forty times."""
    seed = random.randrange(10**6)
    delay = 0.15 + random.Random(seed).random() * longest
    outcome = interrupt(Case(words, saves=words.startswith("train")), tmp_path, delay, tmp_path / "one")
    assert not outcome.wrong, f"seed {seed}, after {delay:.3f} s: {outcome}"
