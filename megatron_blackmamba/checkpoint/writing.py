"""One rank's part of a save: a process forked from the rank writes its shard while training continues.

The writer sees the tensors as they were at the fork, because the kernel copies a private page before either process
changes it. It does not do so for shared pages, which pinned memory consists of. So the writer is only given private
memory (`_private`), and `Write` keeps it until the writer has ended.

megatron-core plans the shards and writes their bytes (`engine/parts/saving.py`). A rank never raises by itself: it says
how its part ended, and all ranks decide together (`lifecycle.py`).
"""

import gc
import math
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_blackmamba.checkpoint import manifest
from megatron_blackmamba.engine.parts import saving
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.runtime.parent import die_with_parent

POLL_SECONDS = 0.5
BLOCKED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Requests to stop are the rank's to answer. Its writer, forked with these blocked, finishes what it began."""


@dataclass
class Part:
    """The outcome of one rank's part of a save."""

    problem: str | None = None
    """Why it could not be written; None if it was."""
    not_finite: str | None = None
    """Name of a tensor that holds NaN or infinity. Nothing was written then."""
    results: list[Any] = field(default_factory=list)
    """torch's WriteResults, for the table of contents."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Manifest entries of the files written, read back from the disk."""


class Write:
    """A rank's shard on its way to the disk. Methods are called from the rank's main thread, but for `wait`."""

    def __init__(self, writer: Any, table: Any) -> None:
        self._writer, self._table = writer, table
        self._process: multiprocessing.process.BaseProcess | None = None
        self._answer: Connection | None = None
        self._part: Part | None = None
        self._staged: list[Any] = []
        """What the writer reads."""

    def start(self) -> None:
        """Copy the tensors to host memory and fork the process that writes them."""
        try:
            buckets = self._staged = [_staged(bucket) for bucket in self._writer.write_buckets or []]
        except (RuntimeError, MemoryError) as error:  # torch raises either for want of memory
            self._part = Part(problem=f"copying its tensors to host memory: {error}")
            return
        if not buckets:  # this rank has nothing to write
            self._part = Part()
            return
        write_bucket = saving.function_of(self._writer)

        def body(answer: Connection, parent: int) -> None:
            _become_writer(parent)
            answer.send(_written(write_bucket, buckets))

        context = multiprocessing.get_context("fork")
        before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
        try:
            self._answer, theirs = context.Pipe(duplex=False)
            with theirs:
                self._process = context.Process(target=body, args=(theirs, os.getpid()), name="checkpoint-writer")
                self._process.start()
        except OSError as error:  # no more processes, files or memory
            self._staged = []
            self._part = Part(problem=f"starting its writer: {error.strerror or error}")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def running(self) -> bool:
        """Return whether the writer has neither answered nor died."""
        return self._part is None and self._answer is not None and not self._answer.poll()

    def wait(self, moved: Callable[[], None] = lambda: None) -> Part:
        """Wait for the writer to end; say how it did. `moved` is called when it has read or written something."""
        if self._part is None:
            assert self._answer is not None and self._process is not None
            before = self._transferred()
            while not self._answer.poll(POLL_SECONDS):
                if (now := self._transferred()) != before:
                    moved()
                before = now
            try:
                self._part = self._answer.recv()
            except (EOFError, OSError):
                self._part = Part(problem="its writer died before it was done")
            self._process.join()
            self._answer.close()
            self._staged = []
            if self._process.exitcode and self._part.problem is None:
                self._part = Part(problem=f"its writer ended with code {self._process.exitcode}")
        return self._part

    def _transferred(self) -> int:
        """Return the bytes that the writer has read and written, if the system tells."""
        assert self._process is not None and self._process.pid is not None
        try:
            counted = psutil.Process(self._process.pid).io_counters()
        except (psutil.Error, AttributeError, OSError):
            return 0
        return counted.read_chars + counted.write_chars

    def size(self) -> int:
        """Return the size of all tensors of the checkpoint on rank 0; 0 on other ranks, which have no table."""
        entries = self._table.state_dict_metadata.values() if self._table is not None else ()
        tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
        return sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors)

    def write_table(self, parts: list[Part]) -> None:
        """Write the table of contents (`.metadata`), on rank 0, from the results of all ranks."""
        self._writer.finish(self._table, [part.results for part in parts])


def _staged(bucket: Any) -> Any:
    """Return a bucket of megatron-core's plan with its tensors in private host memory."""
    path, key, (blobs, tensors) = bucket
    return path, key, (blobs, [(item, _private(tensor)) for item, tensor in tensors])


def _private(tensor: Tensor) -> Tensor:
    """Return a tensor whose values the writer sees as they are now, whatever happens to them here."""
    host = tensor.to("cpu")  # waits for the GPU, and so gets pageable memory, which is private
    return host.clone() if host.is_shared() or host.is_pinned() else host


def _become_writer(parent: int) -> None:
    """Set up a forked process: it dies with its rank, uses one thread, and frees nothing of its rank's on the GPU."""
    die_with_parent(parent)
    gc.disable()
    torch.set_num_threads(1)  # the threads of OpenMP stayed behind in the parent


def _written(write_bucket: Callable[[Any], list[Any]], buckets: list[Any]) -> Part:
    """Check, write and read back; a failure is an answer like another."""
    part, doing = Part(), "checking"
    try:
        for bucket in buckets:
            path, _, (_, tensors) = bucket
            part.not_finite = next((item.index.fqn for item, tensor in tensors if not _is_finite(tensor)), None)
            if part.not_finite is not None:
                return part
            doing = "writing"
            part.results += write_bucket(bucket)
            doing = "reading back"
            part.files[Path(path).name] = manifest.describe(Path(path))
    except Exception as error:  # torch, on a full disk, raises something else than OSError
        part.problem = f"{doing} {Path(path).name}: {reason(error)}"
    return part


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(math.isfinite(extreme) for extreme in tensor.aminmax())  # NaN carries over to both


def reason(error: BaseException) -> str:
    """Return the innermost cause in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if atomic.hides_failed_write(error):
        return f"the file {atomic.NOT_WHOLE}"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
