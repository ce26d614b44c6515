"""The gradients of a micro-batch as one launch: captured as a CUDA graph and then replayed.

A micro-batch of the 1.5B model is about 1,900 launches, which take a host longer than few sequences take a GPU. A graph
knows addresses alone. So the micro-batch is copied to where the graph reads it, and what it found is copied from where
it writes. What a forward and a backward pass change in Python is noted by `Graphs` after each replay.

The first step runs as ever: it compiles kernels and makes the optimizer's state. Then the first micro-batch of a kind
runs on the stream that captures, where PyTorch reports what no graph can hold, and the next one is captured. A kind is
another number of micro-batches, which scales the losses otherwise, or the first micro-batch of a step, which overwrites
the gradients to which the others add.
"""

import gc
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.engine.parts import micro_batch_schedule
from megatron_blackmamba.engine.parts.accumulation import Accumulation
from megatron_blackmamba.runtime import device, layout

Batch = dict[str, Tensor]
Found = dict[str, Tensor]
"""What a micro-batch is found to have, by name: sums of its losses, among others."""
WAIT = "called a synchronizing CUDA operation"
"""What PyTorch says of each wait."""
OTHER_STREAM = "AccumulateGrad node's stream does not match"
"""What PyTorch says where autograd adds a weight's gradient on a stream that does not capture."""
PACKAGE = Path(__file__).parents[2]


class Side:
    """A stream for captures, and memory that they share, since no two run at once."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool: Any = None

    def tried(self, work: Callable[[], Found]) -> tuple[Found, list[str]]:
        """Return what the work finds on the stream, and what in it a graph cannot hold."""
        here = torch.cuda.current_stream()
        torch.cuda.empty_cache()  # memory of the other stream is of no use to this one
        self.stream.wait_stream(here)
        with _reported() as problems, torch.cuda.stream(self.stream):
            found = work()
        here.wait_stream(self.stream)
        return found, problems

    def captured(self, work: Callable[[], Found]) -> "Recorded":
        """Return the work as a graph; nothing of it is computed."""
        graph, self.pool = torch.cuda.CUDAGraph(), self.pool or torch.cuda.graph_pool_handle()
        gc.collect()  # memory of the GPU that only circles of references hold
        # Threads that read data or write a checkpoint may do meanwhile what a capture must not.
        capturing = torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local")
        with torch.cuda.stream(torch.cuda.current_stream()), capturing:  # the same stream again after a failure too
            found = work()
        return Recorded(graph.replay, found)

    def free(self, after_failure: bool = False) -> None:
        """Give back the memory; all graphs are gone.

        PyTorch until 2.13 keeps the memory of a capture that fails as if it went on.
        """
        if self.pool is None:
            return
        gc.collect()
        device, pool, self.pool = torch.cuda.current_device(), self.pool, None
        if after_failure:
            with suppress(RuntimeError, AttributeError):  # newer releases have ended it
                torch.cuda.memory._cuda_endAllocateToPool(device, pool)
        torch.cuda.empty_cache()
        if after_failure and any(part["segment_pool_id"] == pool for part in torch.cuda.memory_snapshot()):
            with suppress(RuntimeError, AttributeError):
                torch.cuda.memory._cuda_releasePool(device, pool)
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Recorded:
    """Work that was captured, and what it returned."""

    replay: Callable[[], None]
    found: Found


@dataclass(frozen=True)
class _Captured:
    recorded: Recorded
    batch: Batch
    """Where it reads the micro-batch."""
    outdated: dict[int, Any]
    """The weights of whose gradients the buffers hold the last step's after it."""
    gradients: list[Tensor | None]
    """Of each weight, where the graph writes its gradient; None if it adds that to a buffer."""
    loss_scale: Tensor | None
    """It reads and writes that tensor, so it must not be freed."""


class Graphs:
    """Captures and replays micro-batches, or says once why it does not."""

    def __init__(self, config: RunConfig, processes: int, reduced: Accumulation, tell: Callable[[str], None]) -> None:
        self.reduced, self._tell = reduced, tell
        self.wanted = config.kernels.cuda_graph == "auto" and device.has_cuda()
        self._why_not, self._steps, self._told = layout.why_no_graph(config, processes), 0, False
        self.captured: dict[Any, _Captured] = {}
        self._tried: set[Any] = set()
        self._count = 0
        self._side: Any = None

    def stop(self, reason: str, after_failure: bool = False) -> None:
        """Go on without graphs."""
        self.wanted = False
        self.release(after_failure)
        self._tell(f"off, so each kernel of a micro-batch is launched by itself: {reason}")

    def release(self, after_failure: bool = False) -> None:
        """Give back the memory of all graphs; they are captured again when they are needed."""
        self.captured.clear()
        if self._side is not None:
            self._side.free(after_failure)

    @contextmanager
    def step(self, micro_batches: int) -> Iterator[None]:
        """Compute the gradients of a step of this many micro-batches within."""
        if self.wanted and self._why_not:
            self.stop(self._why_not)
        if micro_batches != self._count:
            self._count = micro_batches
            self.release()
        yield
        self._steps += 1

    def run(self, batch: Batch, eager: Callable[[Batch], Found]) -> Found | None:
        """Return what the micro-batch is found to have, its gradients added; None if `eager` has to be taken instead.

        eager: computes the gradients of a micro-batch on this device by megatron-core's schedule.
        """
        if not self.wanted or not self._steps:
            return None
        self._side = self._side or Side()
        outdated = self.reduced.outdated
        kind = (self._count, frozenset(outdated), *((name, x.shape, x.dtype) for name, x in batch.items()))
        if kind not in self._tried:
            self._tried.add(kind)
            return self._try(batch, eager)
        captured = self.captured.get(kind)
        if captured is None:
            before, problem = (outdated.copy(), self._gradients()), ""
            try:
                captured = self.captured[kind] = self._capture(batch, eager)
            except RuntimeError as error:
                problem = _first_cause(error)
            if captured is None:  # what it held is free only here
                self.reduced.outdated, gradients = before
                self._set(gradients)
                self.stop(problem, after_failure=True)
                return None
        for name, x in batch.items():
            captured.batch[name].copy_(x, non_blocking=True)
        captured.recorded.replay()
        self.reduced.outdated = captured.outdated.copy()
        self._set(captured.gradients)
        return {name: x.clone() for name, x in captured.recorded.found.items()}

    def _gradients(self) -> list[Tensor | None]:
        return [weight.grad for weight in self.reduced.parameters()]

    def _set(self, gradients: list[Tensor | None]) -> None:
        for weight, gradient in zip(self.reduced.parameters(), gradients, strict=True):
            weight.grad = gradient

    @contextmanager
    def _work(self, batch: Batch, eager: Callable[[Batch], Found]) -> Iterator[tuple[Batch, Callable[[], Found]]]:
        """Yield a copy of the micro-batch, and the work on it as of one of this step's micro-batches."""
        here = {name: x.to(device.device(), copy=True) for name, x in batch.items()}
        self.reduced.keeps_grad = self._count == 1 and self.reduced.reads_grad
        try:
            with micro_batch_schedule.one_of(self._count, self.reduced.config):
                yield here, lambda: eager(here)
        finally:
            self.reduced.keeps_grad = False

    def _try(self, batch: Batch, eager: Callable[[Batch], Found]) -> Found:
        with self._work(batch, eager) as (_, work):
            found, problems = self._side.tried(work)
        if problems:
            self.stop(", ".join(problems))
        return found

    def _capture(self, batch: Batch, eager: Callable[[Batch], Found]) -> _Captured:
        with self._work(batch, eager) as (here, work):
            recorded = self._side.captured(work)
        if not self._told:
            self._told = True
            self._tell("a micro-batch is one launch")
        return _Captured(
            recorded, here, self.reduced.outdated.copy(), self._gradients(), micro_batch_schedule.loss_scale()
        )


def _first_cause(error: BaseException | None) -> str:
    """Say what went wrong first, and where: the end of a failed capture raises again, without saying why."""
    first: RuntimeError | None = None
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return "the GPU's memory does not suffice"
        first, error = error if isinstance(error, RuntimeError) else first, error.__context__
    frames = traceback.extract_tb(first.__traceback__ if first else None)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)]
    place = f" in {Path(ours[-1].filename).relative_to(PACKAGE)}:{ours[-1].lineno}" if ours else ""
    return f"the capture fails{place}: {next(iter(str(first).splitlines()), '')}"


@contextmanager
def _reported() -> Iterator[list[str]]:
    """Yield a list that at the end says what a graph cannot hold: waits of the host, and work on other streams."""
    problems: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield problems
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [f"{each.filename}:{each.lineno}" for each in caught if WAIT in str(each.message)]
    if waits:
        problems.append(f"the host waits for the GPU in {', '.join(dict.fromkeys(waits))}")
    problems += [str(each.message).splitlines()[0] for each in caught if OTHER_STREAM in str(each.message)][:1]
