"""Ranks without the wait: one process imports everything once, and each rank of each run is forked from it.

They are real processes: they talk over gloo, can be killed and leave files. As a program this is the process that is
forked from; `Forks` is the test's end of it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from megatron_blackmamba.formats import atomic
from megatron_blackmamba.runtime import signals
from megatron_blackmamba.runtime.ports import free_port
from tests.runtime.ranks import import_once

ROOT = Path(__file__).resolve().parents[2]
UNTIL = "until"
"""File in a job's folder: its ranks wait before the first step that is larger than the number in it."""


@dataclass
class Job:
    """The ranks of one run. `codes` has the exit codes of those that have ended, by rank, as shells give them."""

    number: int
    pids: list[int]
    folder: Path
    forks: "Forks"
    codes: dict[int, int] = field(default_factory=dict)

    def go_on(self, until: int | None = None) -> None:
        """Let a run that waits take more steps, by default all."""
        if until is None:
            (self.folder / UNTIL).unlink(missing_ok=True)
        else:
            atomic.write_text(self.folder / UNTIL, str(until))

    def wait(self, seconds: float = 900) -> list[int]:
        """Exit codes of all ranks: 128 + signal for the killed."""
        end = time.monotonic() + seconds
        while not self.ended():
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"still running after {seconds} s:\n{self.output()}")
            time.sleep(0.02)
        return [self.codes[rank] for rank in range(len(self.pids))]

    def ended(self) -> bool:
        self.codes.update(self.forks.codes(self.number))
        return len(self.codes) == len(self.pids)

    def kill(self, ranks=None) -> None:
        self.send(signal.SIGKILL, ranks)

    def send(self, number, ranks=None) -> None:
        self.ended()  # the id of a process that has ended may belong to another one
        for rank, pid in enumerate(self.pids):
            if (ranks is None or rank in ranks) and rank not in self.codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("output_*")))


class Forks:
    """Start runs: `run(folder, overrides, ranks=2, trainer="Sleeping")`.

    until: ranks wait after this step for `Job.go_on`, so that a test on a busy machine cannot come too late.
    asked: ranks that are asked to stop before they begin.
    unlike: further overrides of single ranks, by number.
    """

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "RANK", "WORLD", "MASTER"))}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.training.forks"],
            cwd=ROOT,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._jobs = 0
        self._ask({})  # answered once everything is imported

    def run(
        self, folder, overrides=(), ranks=2, trainer="Trainer", config="tiny", until=None, asked=(), unlike=None
    ) -> Job:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if until is not None:
            (folder / UNTIL).write_text(str(until))
        as_on_gpus = ["training.overlap=true", "data.workers=2"]
        overrides = [f"folder={folder}", "name=run", "logging.tensorboard=false", *as_on_gpus, *overrides]
        of_rank = [[*overrides, *(unlike or {}).get(rank, ())] for rank in range(ranks)]
        question = {"config": config, "overrides": of_rank, "ranks": ranks, "trainer": trainer}
        self._jobs += 1
        pids = self._ask({**question, "number": self._jobs, "folder": str(folder), "asked": list(asked)})
        return Job(self._jobs, pids, folder, self)

    def codes(self, number: int) -> dict[int, int]:
        """Return the exit codes of the ranks of this run that have ended."""
        return {int(rank): code for rank, code in self._ask({"codes": number}).items()}

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, question):
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _serve() -> None:
    from tests.training import faults  # noqa: F401

    import_once()
    signals.hold()  # every rank inherits it: a signal waits for the rank to listen, as under the command line
    running: dict[int, tuple[int, int]] = {}  # run and rank of each process id, which the system may use again
    codes: dict[int, dict[int, int]] = {}
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            question = json.loads(line)
            answer = None
            if "codes" in question:
                for (number, rank), code in _ended(running).items():
                    codes.setdefault(number, {})[rank] = code
                answer = codes.get(question["codes"], {})
            elif question:
                answer = [_fork(rank, port, question) for port in [free_port()] for rank in range(question["ranks"])]
                running.update({pid: (question["number"], rank) for rank, pid in enumerate(answer)})
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _ended(running: dict[int, tuple[int, int]]) -> dict[tuple[int, int], int]:
    codes = {}
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            codes[running.pop(pid)] = 128 - code if code < 0 else code
    return codes


def _fork(rank: int, port: int, question: dict) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        output = os.open(f"{question['folder']}/output_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0), os.dup2(output, 1), os.dup2(output, 2)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(question["ranks"]), MASTER_ADDR="127.0.0.1"
        )
        os.environ["MASTER_PORT"] = str(port)
        if rank in question["asked"]:
            os.kill(os.getpid(), signal.SIGTERM)  # held: it waits for the run to listen
        code = _train(question, rank)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        traceback.print_exc()
    finally:
        os._exit(code)


def _train(question: dict, rank: int) -> int:
    from megatron_blackmamba.config import load
    from megatron_blackmamba.training import loop
    from tests.training import faults

    trainer = faults.waiting(getattr(faults, question["trainer"]), Path(question["folder"]) / UNTIL)
    return loop.train(load(question["config"], question["overrides"][rank]), trainer)


if __name__ == "__main__":
    _serve()
