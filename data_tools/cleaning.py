"""How a cleaning runs: its output folder, its lock, and datatrove's executors of its stages.

The work is cut into parts as `tokenize` cuts it into shards, and a part is a task of datatrove's executors: it reads
some raw files and writes `part_00001.jsonl.zst`. A task that is done leaves a marker, so a second call does the rest.
"""

import contextlib
import fcntl
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

try:
    from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
    from datatrove.executor.base import PipelineExecutor
    from datatrove.pipeline.base import PipelineStep
    from loguru import logger
    from multiprocess import resource_tracker
    from multiprocess.util import get_temp_dir, register_after_fork
except ImportError:  # said by `require_datatrove`
    LocalPipelineExecutor = SlurmPipelineExecutor = PipelineExecutor = PipelineStep = object

from megatron_blackmamba.console import interrupts
from megatron_blackmamba.console.cores import usable_cores
from megatron_blackmamba.data_tools.batches import ReadOptions
from megatron_blackmamba.data_tools.options import CleaningOptions
from megatron_blackmamba.data_tools.origins import DONE, SETTINGS, WORK
from megatron_blackmamba.data_tools.rejects import InputError, Tolerance
from megatron_blackmamba.data_tools.sources import Source
from megatron_blackmamba.formats import atomic

JOBS = "slurm_jobs"
"""The file with the ids of the Slurm jobs that work in an output folder."""
OF_SHARDS = ("shard_*", ".shard_*", "tokenizer.json")
"""Names of what `tokenize` writes into its output folder."""
READ = "read"
"""The folder in which each task of a stage notes how many bytes of raw files it has read."""
_NEVER = "DependencyNeverSatisfied"
"""The reason of a pending job whose predecessor failed."""


@dataclass(frozen=True)
class Cleaning:
    """One filtering, deduplication or decontamination: the parts, the output folder, and how the tasks run."""

    name: str
    parts: Sequence[Sequence[Source]]
    out_dir: Path
    read: ReadOptions
    tolerance: Tolerance
    options: CleaningOptions
    settings: dict[str, Any]
    """What the result depends on, apart from the inputs."""

    @property
    def work(self) -> Path:
        """Return the folder for intermediate files, logs and markers."""
        return self.out_dir / WORK / self.name

    @property
    def done(self) -> Path:
        return self.work / DONE

    @property
    def notes(self) -> Path:
        """Return the folder for what the tasks note of documents and parts."""
        return self.work / "notes"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the output folder, or refuse it while another command or a Slurm job works in it."""
        path = self.out_dir / WORK / "lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with this process, and is not its children's
            except (BlockingIOError, PermissionError):
                raise InputError(f"{self.out_dir}: another command works in this folder now. Let it finish") from None
            except OSError:
                pass  # a file system without locks
            if not self.done.exists():
                refuse_unfinished_jobs(path.parent)
            yield

    def refuse_other_settings(self) -> None:
        """Refuse to continue the work of a call with other inputs or options."""
        sources = [source for part in self.parts for source in part]
        inputs = [[source.name, source.bytes, source.modified_ns] for source in sources]
        newer = {
            "formats (--format)": sorted({source.format for source in sources}),
            "files in each part (--part-size)": [*map(len, self.parts)],
        }
        wanted = json.loads(json.dumps({**self.settings, "parts": len(self.parts), "inputs": inputs, **newer}))
        path = self.work / SETTINGS
        if path.exists():
            found = {**newer, **json.loads(path.read_bytes())}  # older versions did not record these
            if found != wanted:
                different = ", ".join(key for key in {**wanted, **found} if found.get(key) != wanted.get(key))
                raise InputError(
                    f"{self.out_dir}: was made with other {different}: choose another folder, or remove it"
                )
        elif self.out_dir.exists() and any(self.out_dir.glob("part_*")):
            raise InputError(f"{self.out_dir}: holds parts of other work: choose another folder")
        elif any(chain.from_iterable(self.out_dir.glob(name) for name in OF_SHARDS)):
            raise InputError(f"{self.out_dir}: `blackmamba data tokenize` writes shards here: choose another folder")
        else:
            atomic.write_json(path, wanted)

    def share(self, stages: Sequence["Stage"]) -> float:
        """Return the part of the work that is done: of tasks that read raw files, by bytes."""
        sizes = [sum(source.bytes for source in part) for part in self.parts]
        return sum(stage.cost * stage.share(sizes) for stage in stages) / sum(stage.cost for stage in stages)

    def stage(
        self, name: str, steps: Sequence[Any], tasks: int, before: Sequence["Stage"] = (), *, cost: float
    ) -> "Stage":
        """Return one stage after those before, which skips tasks that are done. cost: about its part of all work."""
        executor = self._executor(name, steps, tasks, before[-1].executor if before else None)
        return Stage(executor, self.work / name, tasks, cost)

    def _executor(self, stage: str, steps: Sequence[Any], tasks: int, after: Any) -> Any:
        logs = str(self.work / stage)
        if self.options.slurm is None:
            workers = min(self.options.workers or usable_cores(), tasks)
            return _Local(list(steps), tasks=tasks, workers=workers, logging_dir=logs, depends=after)
        bin_dir = Path(sys.executable).parent
        return SlurmPipelineExecutor(
            list(steps),
            tasks=tasks,
            time=self.options.time,
            partition=self.options.slurm,
            mem_per_cpu_gb=self.options.memory,
            job_name=f"{self.name}_{stage}",
            qos="",
            workers=self.options.workers or -1,
            env_command=f'export PATH="{bin_dir}:$PATH"',
            logging_dir=logs,
            depends=after,
            job_id_retriever=partial(record_job, self.out_dir / WORK / JOBS),
        )


class Stage(NamedTuple):
    """Tasks that may run side by side, once the stage before has finished."""

    executor: Any
    folder: Path
    tasks: int
    cost: float

    def share(self, sizes: Sequence[int]) -> float:
        """Return the part that is done, by the bytes of each task's part where this stage reads raw files."""
        finished = self.finished()
        if len(finished) == self.tasks or not (self.folder / READ).is_dir():
            return len(finished) / self.tasks
        begun = [path for path in self.folder.glob(f"{READ}/[0-9]*") if path.name not in finished]
        read = sum(sizes[int(rank)] for rank in finished) + sum(int(path.read_text(encoding="ascii")) for path in begun)
        return min(read / max(sum(sizes), 1), 1.0)

    def finished(self) -> set[str]:
        """Return the ranks of finished tasks, as datatrove writes them: 00000."""
        return {path.name for path in self.folder.glob("completions/*")}


class _Local(LocalPipelineExecutor):
    """datatrove's local executor, whose log goes to files only, and whose processes end with this one."""

    def run(self) -> Any:
        interrupts.keep_blocked(resource_tracker.ensure_running)
        with interrupts.unfinished(get_temp_dir()):  # of this process and those that it starts
            return self._run()

    def _run(self) -> Any:
        register_after_fork(self, partial(_end_with, os.getpid()))  # its manager would wait for ever
        return super().run()

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> Any:
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                return super()._run_for_rank(rank, local_rank, node_rank)
        finally:
            logger.remove()


def _end_with(parent: int, _: _Local) -> None:
    """End this process once its parent has ended, however that one ends."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def require_datatrove() -> None:
    """Refuse to start without datatrove; keep its log off the terminal."""
    if PipelineStep is object:
        raise InputError("datatrove is not installed. Install it with: pip install -e '.[dedup]'")
    logger.remove()


def record_job(path: Path, output: str) -> str:
    """Return the job id that sbatch printed, after adding it to the file at `path`."""
    job = output.split()[-1]
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{job}\n")
        file.flush()
        os.fsync(file.fileno())
    return job


def refuse_unfinished_jobs(work: Path) -> None:
    """Refuse a folder in which Slurm jobs run or wait; forget those that have ended, however they did."""
    path = work / JOBS
    jobs = path.read_text(encoding="utf-8").split() if path.exists() else []
    if not jobs:
        return
    queued = _queued(path, jobs)
    waiting = [job for job in dict.fromkeys(jobs) if job in queued]
    if waiting:
        raise InputError(
            f"{work.parent}: Slurm jobs {', '.join(waiting)} work in this folder. Let them finish, or end them with: "
            f"scancel {' '.join(waiting)}"
        )
    path.unlink()


def _queued(path: Path, jobs: list[str]) -> set[str]:
    """Return the ids of all jobs that run or can still start; the tasks of an array have one id."""
    command = ["squeue", "--noheader", "--all", "--format=%F %r"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or error
        raise InputError(
            f"{path}: lists Slurm jobs {', '.join(jobs)}, and squeue cannot tell whether they have ended "
            f"({str(detail).strip()}). Run this where squeue works, or remove the file once they have"
        ) from None
    rows = (line.split(maxsplit=1) for line in listed.splitlines() if line.strip())
    return {job for job, *reason in rows if _NEVER not in reason}
