"""`--nproc N`: one worker a process on this machine, with the variables torchrun would set.

Not torchrun's agent itself: that kills workers 30 seconds after SIGTERM, dies of SIGUSR1 and turns every exit code
into 1. A run that must save before it stops needs all three the other way round.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats.run_folder import RunFolder

BAD_INPUT = 2  # said by the worker; nothing to add
STOPPED_ON_REQUEST = 75
FORWARDED = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGTERM,  # the terminal is gone: save
}
SHOW_CURSOR = "\x1b[?25h"
LAST_WORDS_SECONDS = 5.0  # for the others to say what they saw, once a worker has failed
POLL_SECONDS = 0.05


def launch_training(config: RunConfig, arguments: Sequence[str], processes: int) -> int:
    """`blackmamba train` with these arguments as `processes` workers."""
    command = [sys.executable, "-m", "megatron_blackmamba", "train", *arguments]
    return launch(command, processes, RunFolder(Path(config.folder) / config.name))


def launch(command: Sequence[str], processes: int, run: RunFolder) -> int:
    """Run `command` as `processes` workers until all have ended; returns the run's exit code."""
    run.requeue.unlink(missing_ok=True)
    group = _Group(command, processes)
    before = {number: signal.signal(number, group.forward) for number in FORWARDED}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # held since the process began
    try:
        code = group.wait()
    finally:
        group.kill()
        for number, handler in before.items():
            signal.signal(number, handler)
        if sys.stdout.isatty():  # a worker that was killed could not tidy up its live display
            print(end=SHOW_CURSOR, flush=True)
    return STOPPED_ON_REQUEST if run.requeue.exists() else code


class _Group:
    """The workers, each a session of its own so that a terminal's Ctrl-C reaches them once, through us."""

    def __init__(self, command: Sequence[str], processes: int) -> None:
        port = _free_port()
        self._interrupts = 0
        self._workers = [
            subprocess.Popen(
                command,
                env=_environment(rank, processes, port),
                start_new_session=True,
                preexec_fn=_before_exec,
            )
            for rank in range(processes)
        ]

    def forward(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                self.kill()
        for worker in self._workers:
            if worker.poll() is None:
                worker.send_signal(FORWARDED[signal.Signals(number)])

    def wait(self) -> int:
        """0 when every worker ends well; otherwise the first failure's code, and soon after it nobody runs."""
        while True:
            codes = [worker.poll() for worker in self._workers]
            failed = [(rank, code) for rank, code in enumerate(codes) if code and code != STOPPED_ON_REQUEST]
            if failed:
                rank, code = failed[0]
                if code == BAD_INPUT:
                    return code
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                print(f"blackmamba: rank {rank} {how}; ending the others", file=sys.stderr, flush=True)
                self._wait_for_all(LAST_WORDS_SECONDS)
                return 128 - code if code < 0 else code
            if None not in codes:
                return max(code or 0 for code in codes)
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """End every worker that is left, and what it started."""
        for worker in self._workers:
            try:
                os.killpg(worker.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            worker.wait()

    def _wait_for_all(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(worker.poll() is None for worker in self._workers):
            time.sleep(POLL_SECONDS)


def _environment(rank: int, processes: int, port: int) -> Mapping[str, str]:
    threads = max(1, (os.cpu_count() or 1) // processes)
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _before_exec() -> None:
    """In the worker, before Python starts: die when the launcher dies; let signals wait until there is a handler."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
