"""Shards spread over processes: each makes one at a time, counts its progress in shared memory, stops when told.

A shard that is on disk already, made from the same files in the same way and unchanged, is not made again.
"""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron_blackmamba.console import interrupts
from megatron_blackmamba.data_tools.object_storage import RemoteFolder
from megatron_blackmamba.data_tools.progress import Count, counted, reading
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.shard_writer import ShardJob, discard_unfinished, write_shard
from megatron_blackmamba.data_tools.sources import Source
from megatron_blackmamba.data_tools.streams import STDIN
from megatron_blackmamba.formats.remote import file_sha256
from megatron_blackmamba.formats.shards import Shard, ShardError, ShardManifest, SourceFile
from megatron_blackmamba.tokenizer import Tokenizer

BYTES_WORTH_A_PROCESS = 8 << 20  # starting one costs as much time as encoding this
THREADS = ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS")
"""Variables that limit the threads of `tokenizers` and of `fastokens`."""
_BEFORE = {"encoding": None, "hold_out": None, "lengths": None}
"""Settings that shards may have been made before."""
_COUNTERS = 3  # a shard: input bytes, tokens, documents


class Stopped(Exception):
    """The work was called off while a shard was under way."""


@dataclass(frozen=True)
class Made:
    """A shard that is there, and whether it was there before."""

    manifest: ShardManifest
    written: bool


def make_shards(
    jobs: Sequence[ShardJob],
    tokenizer: Tokenizer,
    *,
    cores: int,
    overwrite: bool = False,
    quiet: bool = False,
    remote: RemoteFolder | None = None,
) -> list[Made]:
    """Make every shard that is not finished, in this process where one is enough; the first error stops them all."""
    context = interrupts.spawn_context()
    counters = context.RawArray(c_int64, _COUNTERS * len(jobs) + 1)
    task = _Task(tokenizer, counters, os.getpid(), overwrite, remote)

    def count() -> Count:
        return Count(*(sum(counters[i:-1:_COUNTERS]) for i in range(_COUNTERS)))

    total = sum(job.input_bytes for job in jobs)
    processes = min(cores, len(jobs), 1 + total // BYTES_WORTH_A_PROCESS)
    with reading(total, count, quiet=quiet), interrupts.undoing(lambda: discard_unfinished(jobs)):
        if processes <= 1:
            for name in THREADS:
                os.environ.setdefault(name, str(cores))
            return [task(slot, job) for slot, job in enumerate(jobs)]
        return _Crew(task, processes, max(1, cores // processes)).make(jobs)


@dataclass
class _Task:
    """A task that makes the shard of one slot, or finds it complete."""

    tokenizer: Tokenizer
    counters: Any  # three per slot, and a last one that says stop
    owner: int
    overwrite: bool
    remote: RemoteFolder | None = None

    def __call__(self, slot: int, job: ShardJob) -> Made:
        if not self.overwrite and job.sources[0].path != STDIN and self._is_finished(job):
            self._report(slot, job.input_bytes, 0, 0)
            made = Made(with_count(job), written=False)
        else:
            made = Made(write_shard(job, self.tokenizer, lambda *so_far: self._report(slot, *so_far)), written=True)
        if self.remote:
            self.remote.publish(job.prefix)
        return made

    def _is_finished(self, job: ShardJob) -> bool:
        return self.remote.has(job.prefix) if self.remote else is_finished(job)

    def _report(self, slot: int, input_bytes: int, tokens: int, documents: int) -> None:
        self.counters[slot * _COUNTERS : (slot + 1) * _COUNTERS] = (input_bytes, tokens, documents)
        if self.counters[-1] or self.owner not in (os.getpid(), os.getppid()):
            raise Stopped  # told to, or the parent is gone


class _Crew:
    """Processes, each at the end of a pipe: slots and jobs go in, shards or errors come out."""

    def __init__(self, task: _Task, processes: int, threads: int) -> None:
        self.task = task
        self.members: dict[Connection, multiprocessing.process.BaseProcess] = {}
        context = interrupts.spawn_context()
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, task, threads), daemon=True)
            process.start()
            theirs.close()
            self.members[ours] = process

    def make(self, jobs: Sequence[ShardJob]) -> list[Made]:
        # The largest first: no process is left alone with a long one at the end.
        waiting = sorted(range(len(jobs)), key=lambda slot: -jobs[slot].input_bytes)[::-1]
        made: dict[int, Made] = {}
        idle = list(self.members)
        try:
            while len(made) < len(jobs):
                while idle and waiting:
                    slot = waiting.pop()
                    idle.pop().send((slot, jobs[slot]))
                for pipe in wait(list(self.members)):
                    slot, result = self._receive(pipe)  # type: ignore[arg-type]
                    if isinstance(result, BaseException):
                        raise result
                    made[slot] = result
                    idle.append(pipe)  # type: ignore[arg-type]
        finally:
            self._dismiss()
        return [made[slot] for slot in range(len(jobs))]

    def _receive(self, pipe: Connection) -> tuple[int, Any]:
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            process = self.members[pipe]
            process.join()
            raise InputError(
                f"a worker process ended with exit code {process.exitcode}"
                + (", killed, perhaps for memory" if process.exitcode == -signal.SIGKILL else "")
                + ". Finished shards are kept: run the same command again, with fewer --workers if memory is short"
            ) from None

    def _dismiss(self) -> None:
        self.task.counters[-1] = 1  # whoever still works stops at the next block and cleans up
        for pipe, process in self.members.items():
            pipe.close()
            process.join()


def _serve(pipe: Connection, task: _Task, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, and tells through the last counter
    os.environ.update(dict.fromkeys(THREADS, str(threads)))  # before the tokenizer libraries start their threads
    while True:
        try:
            slot, job = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            result: Any = task(slot, job)
        except Stopped:
            return
        except ValueError as error:  # what the user can put right: its message is all there is to say
            result = error
        except Exception:
            result = RuntimeError(traceback.format_exc())
        try:
            pipe.send((slot, result))
        except OSError:
            return


def refuse_other_settings(job: ShardJob, tokenizer: Tokenizer) -> None:
    """Raise InputError where the shard exists, but was made from something else or in another way."""
    if not job.manifest_path.exists():
        return
    manifest = ShardManifest.read(job.manifest_path)
    difference = _difference(manifest, job, tokenizer)
    if difference:
        raise InputError(
            f"{job.prefix} exists and {difference}. Choose another folder, or --overwrite to make its shards again"
        )


def is_finished(job: ShardJob) -> bool:
    """Return whether the shard, which `refuse_other_settings` accepted, exists and is unchanged."""
    try:
        shard = Shard.open(job.prefix)
    except ShardError:
        return False
    idx_sha256, bin_sha256 = file_sha256(shard.idx_path), file_sha256(shard.bin_path)
    return (idx_sha256, bin_sha256) == (shard.manifest.idx_sha256, shard.manifest.bin_sha256)


def with_count(job: ShardJob) -> ShardManifest:
    """Return the manifest of a finished shard. Update its count of shards: inputs may have been added since."""
    manifest = ShardManifest.read(job.manifest_path)
    if manifest.shards != job.of:
        manifest = manifest.model_copy(update={"shards": job.of})
        manifest.write(job.manifest_path)
    return manifest


def _difference(manifest: ShardManifest, job: ShardJob, tokenizer: Tokenizer) -> str | None:
    if manifest.tokenizer_sha256 != tokenizer.sha256:
        return f"was made with another tokenizer ({manifest.tokenizer}, sha256 {manifest.tokenizer_sha256[:12]})"
    if manifest.eod_id != tokenizer.eod_id:
        return f"was made with EOD {manifest.eod_id}, not {tokenizer.eod_id}"
    if manifest.shuffled != job.options.shuffle:
        return "is shuffled" if manifest.shuffled else "is not shuffled"
    if manifest.shuffled and manifest.seed != job.options.seed:
        return f"was shuffled with seed {manifest.seed}, not {job.options.seed}"
    for name, value in job.recorded_options.items():
        before = manifest.options.get(name, _BEFORE.get(name, value))  # a newer setting had no other value
        if before != value:
            return f"was made with {name} = {before!r}, not {value!r}"
    if len(manifest.sources) != len(job.sources):
        count = len(manifest.sources)
        return f"was made from {counted(count, 'file')}, not {len(job.sources)}: other inputs, or another --shard-size"
    for made_from, source in zip(manifest.sources, job.sources, strict=True):
        if not _same_file(made_from, source):
            return f"was made from {made_from.name} ({made_from.sha256[:12]}), which {source.path} is not"
    return None


def _same_file(made_from: SourceFile, source: Source) -> bool:
    if source.path == STDIN:
        return made_from.name == source.name  # what it holds shows only when it is read
    if made_from.bytes != source.bytes:
        return False
    return made_from.modified_ns == source.modified_ns or file_sha256(source.path) == made_from.sha256
