import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.runtime import exits
from megatron_blackmamba.training import launcher
from tests.waiting import Command, wait_until

ROOT = Path(__file__).resolve().parents[2]

LAUNCH = """
import sys
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.training import launcher
launcher.LAST_WORDS_SECONDS = float(sys.argv[4])
command, node = [sys.executable, "-c", sys.argv[1]], launcher.Node(*map(int, sys.argv[5:]))
sys.exit(launcher.launch(command, 2, RunFolder(sys.argv[2]), restarts=int(sys.argv[3]), node=node))
"""

WORKER = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path({folder!r}), int(os.environ["RANK"])
"""
SAVES_WHEN_ASKED = """
def stop(number, frame):
    (folder / f"rank_{rank}").write_text(signal.Signals(number).name)
    (folder / "requeue").write_text("")
    sys.exit(75)
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
(folder / f"ready_{rank}").write_text("")
time.sleep(900)
"""


TRIES = """
tries = folder / f"tries_{rank}"
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
this_try = len(tries.read_text())
def both():
    files = [folder / f"tries_{r}" for r in (0, 1)]
    while not all(file.exists() and file.stat().st_size >= this_try for file in files):
        time.sleep(0.02)
"""


def start(folder, body, restarts=0, last_words=300.0, node=()):
    worker = WORKER.format(folder=str(folder)) + body
    command = [sys.executable, "-c", LAUNCH, worker, str(folder), str(restarts), str(last_words), *map(str, node)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def wait_for(process, *paths):
    wait_until(lambda: all(path.exists() for path in paths), Command(process))


def finish(process):
    _, errors = process.communicate(timeout=900)
    return process.returncode, errors


def test_workers_get_torchrun_variables_and_zero_is_returned(tmp_path):
    body = """
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
(folder / f"rank_{rank}").write_text(" ".join(os.environ[name] for name in names))
"""
    code, _ = finish(start(tmp_path, body))
    first, second = ((tmp_path / f"rank_{rank}").read_text().split() for rank in (0, 1))
    assert code == 0
    assert first[:4] == ["0", "0", "2", "2"] and second[:4] == ["1", "1", "2", "2"]
    assert first[4:] == second[4:] and 0 < int(first[5]) < 65536


def test_workers_of_two_machines_are_numbered_through(tmp_path, monkeypatch):
    """Both launchers are in the folder at once; the second takes no lock there."""
    monkeypatch.setenv("MASTER_ADDR", "first.example")
    body = """
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
(folder / f"rank_{rank}").write_text(" ".join(os.environ[name] for name in names))
while len(list(folder.glob("rank_*"))) < 4: time.sleep(0.02)
"""
    machines = [start(tmp_path, body, node=(number, 2)) for number in (0, 1)]
    assert [finish(machine) for machine in machines] == [(0, "")] * 2
    assert [(tmp_path / f"rank_{rank}").read_text() for rank in range(4)] == [
        f"{rank} {rank % 2} 4 2 first.example {launcher.PORT}" for rank in range(4)
    ]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_reaches_every_worker_and_exits_with_75(tmp_path, number):
    process = start(tmp_path, SAVES_WHEN_ASKED)
    wait_for(process, tmp_path / "ready_0", tmp_path / "ready_1")
    process.send_signal(number)
    assert finish(process)[0] == 75
    assert {(tmp_path / f"rank_{rank}").read_text() for rank in (0, 1)} == {
        "SIGTERM" if number == signal.SIGHUP else number.name
    }


def test_early_signal_is_kept_and_kills_no_worker(tmp_path):
    body = '(folder / f"began_{rank}").write_text("")\nwhile signal.SIGUSR1 not in signal.sigpending(): pass\n'
    process = start(tmp_path, body + SAVES_WHEN_ASKED)
    wait_for(process, tmp_path / "began_0", tmp_path / "began_1")
    process.send_signal(signal.SIGUSR1)
    assert finish(process)[0] == 75
    assert (tmp_path / "rank_0").exists() and (tmp_path / "rank_1").exists()


@pytest.mark.parametrize("end, code", [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_one_worker_ending_ends_all_and_their_children(tmp_path, end, code):
    body = f"""
import subprocess
child = subprocess.Popen(["sleep", "300"])
(folder / f"child_{{rank}}").write_text(str(child.pid))
while not all((folder / f"child_{{r}}").exists() for r in (0, 1)):
    time.sleep(0.02)
if rank == 1:
    {end}
time.sleep(300)
"""
    process = start(tmp_path, body, last_words=0.1)
    returned, errors = finish(process)
    assert returned == code
    assert "rank 1" in errors
    for rank in (0, 1):
        child = int((tmp_path / f"child_{rank}").read_text())
        wait_until(lambda child=child: not running(child, "sleep"))  # killed already, but a busy machine takes a moment


def test_a_killed_launcher_takes_its_workers_along(tmp_path):
    process = start(tmp_path, '(folder / f"pid_{rank}").write_text(str(os.getpid()))\ntime.sleep(300)')
    paths = [tmp_path / "pid_0", tmp_path / "pid_1"]
    wait_until(lambda: all(path.exists() and path.read_text() for path in paths), Command(process))
    process.kill()
    process.communicate()
    pids = [int(path.read_text()) for path in paths]
    wait_until(lambda: not any(running(pid, str(tmp_path)) for pid in pids))


def test_marker_of_an_earlier_job_is_ignored(tmp_path):
    RunFolder(tmp_path).requeue.write_text("")
    assert finish(start(tmp_path, ""))[0] == 0


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(70)"])
def test_a_crash_or_hang_starts_all_workers_again(tmp_path, end):
    body = (
        TRIES
        + f"""
(folder / f"port_{{rank}}_{{this_try}}").write_text(os.environ["MASTER_PORT"])
both()
if this_try == 1:
    if rank == 1:
        {end}
    time.sleep(300)
"""
    )
    code, errors = finish(start(tmp_path, body, restarts=3, last_words=0.1))
    assert code == 0, errors
    assert [(tmp_path / f"tries_{rank}").read_text() for rank in (0, 1)] == ["xx", "xx"]
    assert "rank 1" in errors and "starting again from the beginning" in errors
    assert (tmp_path / "port_0_1").read_text() != (tmp_path / "port_0_2").read_text()


def test_restarts_are_limited_until_a_checkpoint_appears(tmp_path):
    body = (
        TRIES
        + """
both()
if rank == 1:
    if this_try == 2:
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints/latest").write_text("step_00000007")
    sys.exit(1)
time.sleep(300)
"""
    )
    code, errors = finish(start(tmp_path, body, restarts=2, last_words=0.1))
    assert code == 1
    assert (tmp_path / "tries_1").read_text() == "x" * 4  # the second try brought a checkpoint and two more tries
    assert errors.count("starting again from step_00000007") == 2
    assert "3 tries without a new checkpoint" in errors


@pytest.fixture
def little_memory():
    """A control group of 256 MiB; yields the file to join it by."""
    group = Path("/sys/fs/cgroup/memory/little-memory-test")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(256 * 2**20))
    except OSError as error:
        pytest.skip(f"no cgroup here that limits memory: {error}")
    yield group / "cgroup.procs"
    wait_until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


@pytest.mark.parametrize(("saves", "tries"), [(False, "x"), (True, "xx")])
def test_worker_without_memory_is_named(tmp_path, little_memory, saves, tries):
    """It is started again only if there is a new checkpoint."""
    body = (
        TRIES
        + f"""
both()
if rank == 1:
    if {saves} and this_try == 1:
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints/latest").write_text("step_00000007")
    bytearray(1 << 30)
time.sleep(300)
"""
    )
    worker = WORKER.format(folder=str(tmp_path)) + body
    joined = (
        f"from pathlib import Path\nimport os\nPath({str(little_memory)!r}).write_text(str(os.getpid()))\n" + LAUNCH
    )
    command = [sys.executable, "-c", joined, worker, str(tmp_path), "3", "0.1"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    code, errors = finish(process)
    assert code == 137, errors
    assert (tmp_path / "tries_1").read_text() == tries
    assert "rank 1 was killed by the kernel: the run needs more than the 0.2 GiB of memory here. Use" in errors


@pytest.mark.parametrize("code", sorted(exits.FINAL - {0, exits.STOPPED_ON_REQUEST}))
def test_refused_or_given_up_run_is_not_restarted(tmp_path, code):
    body = TRIES + f"both()\nif rank == 1:\n    sys.exit({code})\nsys.exit(1 if {code} == 65 else 0)"
    assert finish(start(tmp_path, body, restarts=3))[0] == code
    assert (tmp_path / "tries_0").read_text() == "x"


def test_a_signal_between_two_tries_stops_the_run(tmp_path):
    body = (
        TRIES
        + """
if rank == 1:
    sys.exit(1)
signal.sigwait([signal.SIGUSR1, signal.SIGTERM])  # the launcher waits for last words, then starts again
"""
    )
    process = start(tmp_path, body, restarts=3)
    assert "rank 1 ended with code 1; ending the others" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    code, errors = finish(process)
    assert code == 75, errors
    assert "a stop was requested" in errors
    assert (tmp_path / "tries_1").read_text() == "x"


def test_a_signal_while_workers_start_reaches_all(tmp_path):
    code = """
import os, signal, sys
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.training import launcher
free_port = launcher.free_port
def asked_meanwhile():
    os.kill(os.getpid(), signal.SIGTERM)
    return free_port()
launcher.free_port = asked_meanwhile
sys.exit(launcher.launch([sys.executable, "-c", sys.argv[1]], 2, RunFolder(sys.argv[2])))
"""
    worker = WORKER.format(folder=str(tmp_path)) + SAVES_WHEN_ASKED
    done = subprocess.run([sys.executable, "-c", code, worker, str(tmp_path)], cwd=ROOT)
    assert done.returncode == 75
    assert {(tmp_path / f"rank_{rank}").read_text() for rank in (0, 1)} == {"SIGTERM"}


def test_a_second_interrupt_while_waiting_does_not_block(tmp_path):
    """Python's `Popen` has a lock: a handler that waits for a worker would block a main thread that looks at it."""
    signals = launcher._Signals()
    try:
        group = signals.start(lambda: launcher._Group(["sleep", "600"], 1))
        with group._workers[0]._waitpid_lock:
            interrupting = threading.Thread(target=lambda: [signals._on_signal(signal.SIGINT, None) for _ in range(2)])
            interrupting.start()
            interrupting.join(timeout=20)
            assert not interrupting.is_alive()
        assert group.wait(lambda: None) == exits.INTERRUPTED
        group.kill()
    finally:
        signals.release()


def test_a_failure_between_two_looks_is_a_failure(monkeypatch):
    """The last of two workers is killed between two looks at it; the first has ended well."""
    group = launcher._Group(["true"], 2)
    for worker in group._workers:
        worker.wait()
    looks = iter([None])
    monkeypatch.setattr(group._workers[1], "poll", lambda: next(looks, -signal.SIGKILL))
    assert group.wait(lambda: None) == 128 + signal.SIGKILL
    group.kill()


def test_run_stays_locked_between_crash_and_restart(tmp_path):
    """A worker crashes; before the next start, another process tries to train in the folder."""
    code = """
import subprocess, sys
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.training import launcher
free_port, tries = launcher.free_port, []
TAKE = "import sys, pathlib; from megatron_blackmamba.training.keep import lock; lock.Lock(pathlib.Path(sys.argv[1]))"
def meanwhile():
    tries.append(0)
    if len(tries) == 2:
        subprocess.run([sys.executable, "-c", TAKE, sys.argv[2] + "/lock"])
    return free_port()
launcher.free_port = meanwhile
sys.exit(launcher.launch([sys.executable, "-c", sys.argv[1]], 1, RunFolder(sys.argv[2]), restarts=1))
"""
    lock = "from megatron_blackmamba.training.keep.lock import Lock; Lock(folder / 'lock')\n"
    worker = WORKER.format(folder=str(tmp_path)) + TRIES + lock + "sys.exit(this_try == 1)"
    done = subprocess.run(
        [sys.executable, "-c", code, worker, str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.search(rf"RunInUse: {tmp_path} is in use by process \d+ on", done.stderr), done.stderr
    assert (tmp_path / "tries_0").read_text() == "xx"  # the launcher's own worker could lock it


def test_a_second_launcher_is_refused(tmp_path):
    first = start(tmp_path, SAVES_WHEN_ASKED)
    wait_for(first, tmp_path / "ready_0", tmp_path / "ready_1")
    second = start(tmp_path, "sys.exit(0)")
    assert f"in use by process {first.pid} on" in second.communicate()[1]
    assert second.returncode == 1
    first.send_signal(signal.SIGTERM)
    first.communicate()
    assert first.returncode == 75


def running(pid, word):
    """Tell whether a process runs, and not another one that got its id: by a word of its command line."""
    try:
        return word in Path(f"/proc/{pid}/cmdline").read_text()  # empty once it has ended
    except (FileNotFoundError, ProcessLookupError):
        return False


REFUSES, CRASHES = "sys.exit(2)", "os.kill(os.getpid(), 9)"


@pytest.mark.parametrize("end, code", [(REFUSES, exits.BAD_INPUT), (CRASHES, 137)])
def test_marker_of_earlier_job_stays_and_decides_nothing(tmp_path, end, code):
    (tmp_path / "requeue").touch()
    assert finish(start(tmp_path, end, last_words=0.1))[0] == code
    assert (tmp_path / "requeue").exists()


def test_launcher_of_refused_run_removes_what_it_made(tmp_path):
    assert finish(start(tmp_path / "runs/new", REFUSES))[0] == exits.BAD_INPUT
    assert not (tmp_path / "runs").exists()
