"""The gradients of a micro-batch as one launch: captured as a CUDA graph and then replayed.

A micro-batch of the 1.5B model is about 1,900 launches, which take a host longer than few sequences take a GPU. A graph
knows addresses alone. So the micro-batch is copied to where the graph reads it, and what it found is copied from where
it writes. What a forward and a backward pass change in Python is noted by `Graphs` after each replay.

The first step runs as ever and compiles kernels. In the second one PyTorch reports each wait of the host for the GPU,
which no graph can hold. From the third on, a micro-batch is captured where none of its kind has been: another number of
micro-batches scales the losses otherwise, and the first one overwrites the gradients to which the others add.
"""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.engine.parts import schedule
from megatron_blackmamba.engine.parts.accumulation import Accumulation
from megatron_blackmamba.runtime import device

Batch = dict[str, Tensor]
Found = dict[str, Tensor]
"""What a micro-batch is found to have, by name: sums of its losses, among others."""
WAIT = "called a synchronizing CUDA operation"
"""What PyTorch says of each wait."""
EAGER = 2
"""Steps before the first capture. They also make the optimizer's state, for which a graph would leave no memory."""


def why_not(config: RunConfig, processes: int) -> str:
    """Return why the gradients of a run on GPUs cannot be captured, or an empty string."""
    if processes > 1:
        return "only a process alone captures: exchanges between ranks, and measuring slow ones, need the host"
    if config.training.recompute != "none":
        return "training.recompute saves and restores the state of random numbers"
    return ""


class Recorded:
    """Work that was captured, and what it returned."""

    def __init__(self, work: Callable[[], Found], pool: Any):
        self.graph = torch.cuda.CUDAGraph()
        gc.collect()  # memory of the GPU that only circles of references hold
        # Threads that read data or write a checkpoint may do meanwhile what a capture must not.
        captured = torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local")
        with torch.cuda.stream(torch.cuda.current_stream()), captured:  # the same stream again after a failure too
            self.found = work()
        self.replay = self.graph.replay


@dataclass(frozen=True)
class _Captured:
    recorded: Any
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
        self._why_not, self._steps, self._told = why_not(config, processes), 0, False
        self.captured: dict[Any, _Captured] = {}
        self._count = 0
        self._pool: Any = None

    def stop(self, reason: str) -> None:
        """Go on without graphs."""
        self.wanted = False
        self.release()
        self._tell(f"off, so each kernel of a micro-batch is launched by itself: {reason}")

    def release(self) -> None:
        """Give back the memory of all graphs; they are captured again when they are needed."""
        self.captured.clear()
        if self._pool is not None:
            self._pool = None
            torch.cuda.empty_cache()

    @contextmanager
    def step(self, micro_batches: int) -> Iterator[None]:
        """Compute the gradients of a step of this many micro-batches within."""
        if self.wanted and self._why_not:
            self.stop(self._why_not)
        if micro_batches != self._count:
            self._count = micro_batches
            self.release()
        self._steps += 1
        with _waits_reported(self.wanted and self._steps == EAGER) as waits:
            yield
        if waits:
            self.stop(f"the host waits for the GPU in {', '.join(dict.fromkeys(waits))}")

    def run(self, batch: Batch, eager: Callable[[Batch], Found]) -> Found | None:
        """Return what the micro-batch is found to have, its gradients added; None if `eager` has to be taken instead.

        eager: computes the gradients of a micro-batch on this device by megatron-core's schedule.
        """
        if not self.wanted or self._steps <= EAGER:
            return None
        outdated = self.reduced.outdated
        kind = (frozenset(outdated), *((name, x.shape, x.dtype) for name, x in batch.items()))
        captured = self.captured.get(kind)
        if captured is None:
            before, problem = (outdated.copy(), self._gradients()), ""
            try:
                captured = self.captured[kind] = self._capture(batch, eager)
            except torch.OutOfMemoryError:
                problem = "the GPU's memory does not suffice"
            except RuntimeError as error:
                problem = f"the capture fails: {_first_line(_cause(error))}"
            if captured is None:  # what it held is free only here
                self.reduced.outdated, gradients = before
                self._set(gradients)
                self.stop(problem)
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

    def _capture(self, batch: Batch, eager: Callable[[Batch], Found]) -> _Captured:
        if self._pool is None:
            self._pool = new_pool()
        here = {name: x.to(device.device(), copy=True) for name, x in batch.items()}
        self.reduced.keeps_grad = self._count == 1 and self.reduced.reads_grad
        try:
            with schedule.one_of(self._count, self.reduced.config):
                recorded = Recorded(lambda: eager(here), self._pool)
        finally:
            self.reduced.keeps_grad = False
        if not self._told:
            self._told = True
            self._tell("a micro-batch is one launch")
        return _Captured(recorded, here, self.reduced.outdated.copy(), self._gradients(), schedule.loss_scale())


def _cause(error: BaseException) -> BaseException:
    """Return what went wrong first: the end of a failed capture raises again, without saying why."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def new_pool() -> Any:
    """Return memory that graphs share, since no two run at once."""
    return torch.cuda.graph_pool_handle()


@contextmanager
def _waits_reported(wanted: bool) -> Iterator[list[str]]:
    """Yield a list that at the end names the lines in which the host waited for the GPU."""
    waits: list[str] = []
    if not wanted:
        yield waits
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits += [f"{each.filename}:{each.lineno}" for each in caught if WAIT in str(each.message)]
