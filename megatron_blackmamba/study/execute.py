"""Runs of a study, several at once on this machine or as Slurm jobs; a stop saves them, and the next call goes on."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megatron_blackmamba.config import to_yaml
from megatron_blackmamba.console.cores import usable_cores
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.runtime.exits import STOPPED_ON_REQUEST
from megatron_blackmamba.runtime.parent import follow_parent
from megatron_blackmamba.runtime.slurm import squeue
from megatron_blackmamba.study import progress
from megatron_blackmamba.study.config import StudyError
from megatron_blackmamba.study.runs import Cell

POLL_SECONDS = 0.2
Say = Callable[[str], None]


class Local:
    """A runner that trains cells on this machine, `jobs` at a time, on OMP_NUM_THREADS or equal shares of the cores."""

    def __init__(self, configs: Path, jobs: int, seconds: float | None, say: Say):
        self.configs, self.jobs, self.say = configs, jobs, say
        self.until = None if seconds is None else time.monotonic() + seconds
        share = max(1, usable_cores() // jobs)
        self.threads = os.environ.get("OMP_NUM_THREADS") or str(share)
        self.running: dict[subprocess.Popen, list[Cell]] = {}
        self.stopping = False
        self.requests = 0
        """Signals received. The handler only counts them: it may run inside a print, and must not print itself."""
        self.failed: list[str] = []
        self.counts = (0, 0)

    def train(self, cells: Sequence[Cell]) -> bool:
        """Train what is not done; return whether all are done. A failed run does not stop the others."""
        left = [cell for cell in cells if not cell.done]
        waiting = [[*chain] for _, chain in itertools.groupby(left, lambda cell: cell.chain)]
        self.counts = len(cells) - len(left), len(cells)
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with progress.show(cells, lambda: [chain[0] for chain in self.running.values() if chain]):
                while self.running or (waiting and not self.stopping):
                    if self.requests > 1:
                        raise KeyboardInterrupt
                    if self.requests or (self.until is not None and time.monotonic() > self.until):
                        self._stop()
                    while len(self.running) < self.jobs and not self.stopping and (ready := self._ready(waiting)):
                        waiting.remove(ready)
                        self._start(ready)
                    for process, chain in [*self.running.items()]:
                        self._look(process, chain)
                    time.sleep(POLL_SECONDS)
        finally:
            for process in self.running:
                process.kill()
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.failed:
            raise StudyError(f"{len(self.failed)} runs failed: {self.failed[0]}. Run the same command to retry them")
        return not waiting and all(cell.done for cell in cells)

    def _ready(self, waiting: Sequence[list[Cell]]) -> list[Cell] | None:
        """Return the first chain whose trunk no process trains."""
        trained = {cell.chain for chain in self.running.values() for cell in chain}
        return next((chain for chain in waiting if chain[0].chain not in trained), None)

    def _start(self, chain: list[Cell]) -> None:
        written = []
        for cell in chain:
            for name, config in ((f"{cell.name}.trunk", cell.trunk), (cell.name, cell.config)):
                if config is not None:
                    written.append(self.configs / f"{name}.yaml")
                    atomic.write_text(written[-1], to_yaml(config))
        environment = {**os.environ, "OMP_NUM_THREADS": self.threads}
        with open(self.output(chain[0]), "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "megatron_blackmamba.study.worker", *map(str, written)],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches this process, which then asks the runs to save
                preexec_fn=partial(follow_parent, os.getpid()),
            )
        self.running[process] = chain

    def output(self, cell: Cell) -> Path:
        """Return the file with what a run prints."""
        return self.configs / f"{cell.chain}.txt"

    def _look(self, process: subprocess.Popen, chain: list[Cell]) -> None:
        """Say which runs of a chain have ended since the last look."""
        ended = process.poll() is not None
        while chain and chain[0].done:
            done, total = self.counts
            self.counts = done + 1, total
            self.say(f"{done + 1}/{total} {chain.pop(0).name}")
        if not ended:
            return
        del self.running[process]
        asked = process.returncode == STOPPED_ON_REQUEST or (self.stopping and process.returncode == -signal.SIGTERM)
        if chain and not asked:
            code = process.returncode
            self.failed.append(f"{chain[0].name} ended with code {code}, see {self.output(chain[0])}")
            self.say(self.failed[-1])

    def _on_signal(self, *_: object) -> None:
        self.requests += 1

    def _stop(self) -> None:
        """Ask the runs to save and end; a second request kills them."""
        if self.stopping:
            return
        self.stopping = True
        self.say("saving; the same command goes on from here")
        for process in self.running:
            process.send_signal(signal.SIGTERM)


def submit_jobs(cells: Sequence[Cell], configs: Path, sbatch: Sequence[str], gpus: str, hours: str, say: Say) -> int:
    """Submit what is neither done nor in the queue as Slurm jobs of one node each; return how many."""
    from megatron_blackmamba.launch.job import JobRequest
    from megatron_blackmamba.launch.submit import submit

    queued = squeue("--me", "--format=%A")
    if queued is None:
        raise StudyError("Slurm does not say what is queued, so nothing was submitted. Try again where squeue works")
    request, submitted = JobRequest(nodes=1, gpus_per_node=gpus, time=hours, options=tuple(sbatch)), 0
    for cell in cells:
        marker = configs / f"{cell.name}.job"
        if cell.done or (marker.exists() and marker.read_text(encoding="utf-8").strip() in queued):
            continue
        job = submit(cell.config, request).jobs[0]
        atomic.write_text(marker, f"{job}\n")
        say(f"{cell.name}: job {job}")
        submitted += 1
    return submitted
