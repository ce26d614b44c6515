"""`--nproc N`: start N workers on this machine, with the variables of torchrun.

Workers that crash or hang are started again from the newest checkpoint. If the kernel kills one for lack of memory
before a new checkpoint, the run ends: it would be killed again. With `--node K/M`, launchers on M machines start N
workers each, and none starts them again: what started the launchers does.

Neither torchrun's agent nor NVRx's ft_launcher fits: both die of SIGUSR1, kill workers that are still saving, and turn
every exit code into 1.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.console.cores import usable_cores
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.runtime import machine
from megatron_blackmamba.runtime.exits import BAD_INPUT, FINAL, INTERRUPTED, RESTARTS, STOPPED_ON_REQUEST
from megatron_blackmamba.runtime.failure import SAID
from megatron_blackmamba.runtime.parent import follow_parent
from megatron_blackmamba.runtime.ports import free_port
from megatron_blackmamba.runtime.signals import heeded
from megatron_blackmamba.training.keep.lock import LAUNCHED_BY, Lock

FORWARDED = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGTERM,  # the terminal is gone: save
}
PORT = "29500"
"""MASTER_PORT of several machines, unless it is set; a single one takes a free port."""
SHOW_CURSOR = "\x1b[?25h"
LAST_WORDS_SECONDS = 5.0  # for the others to say what they saw, once a worker has failed
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Node:
    """The number of this machine in a run. With several machines, MASTER_ADDR names the first."""

    number: int = 0
    count: int = 1


def launch_training(
    config: RunConfig,
    arguments: Sequence[str],
    processes: int,
    restarts: int = RESTARTS,
    asks_to_stop: Callable[[], bool] = bool,
    node: Node = Node(),
) -> int:
    """Run `blackmamba train` with these arguments as `processes` workers on this machine."""
    command = [sys.executable, "-m", "megatron_blackmamba", "train", *arguments]
    return launch(command, processes, RunFolder.of(config), restarts, asks_to_stop, node)


def launch(
    command: Sequence[str],
    processes: int,
    run: RunFolder,
    restarts: int = RESTARTS,
    asks_to_stop: Callable[[], bool] = bool,
    node: Node = Node(),
) -> int:
    """Run `command` as `processes` workers until all have ended; return the run's exit code.

    restarts: how often to start them again after a crash or a hang. A new checkpoint resets the count.
    asks_to_stop: called about twenty times a second; once it returns True, the workers save and end, as after SIGTERM.
    """
    run.refuse_obstacles()
    lock = Lock(run.lock, launcher=True) if node.number == 0 else None  # before anything in the folder changes
    signals, code = _Signals(), 0
    left, earlier = restarts, _identity(run.requeue)
    try:
        while True:
            before = _newest(run)
            group = signals.start(lambda: _Group(command, processes, node))
            try:
                code = group.wait(lambda: signals.ask(asks_to_stop))
            finally:
                group.kill()
            if _identity(run.requeue) not in (None, earlier):
                return STOPPED_ON_REQUEST
            if code in FINAL or signals.interrupts > 1:
                return code
            newest = _newest(run)
            if signals.asked:
                _say(f"not started again, since a stop was requested; the newest checkpoint is {newest or 'none'}")
                return STOPPED_ON_REQUEST
            if group.out_of_memory and newest == before:
                return code
            left = restarts if newest != before else left
            if not left:
                if restarts:
                    _say(f"{restarts + 1} tries without a new checkpoint; the run stops here")
                return code
            left -= 1
            if lock:
                lock.restore()
            _say(f"starting again from {newest or 'the beginning'} (restarts left without a new checkpoint: {left})")
    finally:
        signals.release()
        if lock:
            lock.discard() if code == BAD_INPUT else lock.release()
        if sys.stdout.isatty():  # a worker that was killed could not tidy up its live display
            with contextlib.suppress(OSError):
                print(end=SHOW_CURSOR, flush=True)


class _Signals:
    """A relay of signals to the workers; it keeps them while there are no workers."""

    def __init__(self) -> None:
        self.asked = False
        self.interrupts = 0
        self._group: _Group | None = None
        self._before = {number: signal.signal(number, self._on_signal) for number in heeded(FORWARDED)}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # held since the program began

    def start(self, make: Callable[[], "_Group"]) -> "_Group":
        """Start a group of workers; a signal that comes meanwhile waits until all of them can get it."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            self._group = group = make()
            if self.asked:  # after the last look at it
                group.send(signal.SIGTERM)
            return group
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def ask(self, asks_to_stop: Callable[[], bool]) -> None:
        """End the workers as SIGTERM would if `asks_to_stop()`; once is enough."""
        if not self.asked and asks_to_stop():
            self._on_signal(signal.SIGTERM, None)

    def release(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass the signal on. This may run inside a print or a wait, so it does neither."""
        self.asked = True
        self.interrupts += number == signal.SIGINT
        if self._group and self.interrupts > 1:
            self._group.end(INTERRUPTED)
        elif self._group:
            self._group.send(FORWARDED[signal.Signals(number)])


class _Group:
    """The workers, each a session of its own so that a terminal's Ctrl-C reaches them once, through us."""

    def __init__(self, command: Sequence[str], processes: int, node: Node = Node()) -> None:
        environment = _environment(processes, node)
        self._first = node.number * processes
        self._code: int | None = None
        self._killed_before = machine.killed_for_memory()
        self.out_of_memory = False
        """Whether the kernel has killed a worker for lack of memory."""
        self._said = tempfile.NamedTemporaryFile(prefix="blackmamba_said_")  # noqa: SIM115
        self._workers = [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(self._first + rank), "LOCAL_RANK": str(rank), SAID: self._said.name},
                start_new_session=True,
                preexec_fn=partial(_before_exec, os.getpid()),
            )
            for rank in range(processes)
        ]

    def send(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.poll() is None:
                worker.send_signal(number)

    def wait(self, meanwhile: Callable[[], None]) -> int:
        """Return 0 when every worker ends well; otherwise the first failure's code, and soon after it nobody runs."""
        while True:
            meanwhile()
            codes = self._codes()  # one look: a worker that fails between two would count as one that ended well
            if failed := _failed(codes):
                rank, code = failed[0]
                if self._code is not None or code in (BAD_INPUT, INTERRUPTED):
                    return self._code or code
                _say(f"rank {self._first + rank} {self._end(code)}; ending the others")
                self._wait_for_all(LAST_WORDS_SECONDS)
                final = next((code for _, code in _failed(self._codes()) if code in FINAL), None)
                return final or (128 - code if code < 0 else code)
            if None not in codes:
                return max(code or 0 for code in codes)
            time.sleep(POLL_SECONDS)

    def end(self, code: int | None = None) -> None:
        """Kill every remaining worker and its children, without waiting; `wait` then returns `code`."""
        self._code = code
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill every remaining worker and its children, and wait for their end."""
        self.end()
        for worker in self._workers:
            worker.wait()
        self._said.close()

    def _end(self, code: int) -> str:
        """Say how a worker ended."""
        self.out_of_memory = code == -signal.SIGKILL and machine.killed_for_memory() > self._killed_before
        if self.out_of_memory:
            has = machine.memory()[0] / 2**30
            return (
                f"was killed by the kernel: the run needs more than the {has:,.1f} GiB of memory here. Use fewer"
                " processes, a smaller training.micro_batch, or training.recompute=layers"
            )
        return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"

    def _codes(self) -> list[int | None]:
        return [worker.poll() for worker in self._workers]

    def _wait_for_all(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(worker.poll() is None for worker in self._workers):
            time.sleep(POLL_SECONDS)


def _failed(codes: Sequence[int | None]) -> list[tuple[int, int]]:
    return [(rank, code) for rank, code in enumerate(codes) if code and code != STOPPED_ON_REQUEST]


def _identity(marker: Path) -> tuple[int, int] | None:
    """Return what tells a marker from one that is written anew; None without one."""
    try:
        found = marker.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _newest(run: RunFolder) -> str | None:
    """Name the newest checkpoint."""
    try:
        return run.latest.read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"blackmamba: {text}", file=sys.stderr, flush=True)


def _environment(processes: int, node: Node) -> Mapping[str, str]:
    """Return what all workers of this machine share."""
    threads = max(1, usable_cores() // processes)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if node.count == 1 else {}
    return {
        "OMP_NUM_THREADS": str(threads),
        "MASTER_PORT": PORT,
        **os.environ,
        LAUNCHED_BY: str(os.getpid()),
        "WORLD_SIZE": str(node.count * processes),
        "LOCAL_WORLD_SIZE": str(processes),
        **here,
    }


def _before_exec(launcher: int) -> None:
    """Prepare the worker before Python starts: it dies with the launcher, and signals wait for a handler."""
    follow_parent(launcher)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
