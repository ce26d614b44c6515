"""Faults that real streams make possible, planted on CPUs by stand-ins; a comparison of layouts must catch each.

As an extension (BLACKMAMBA_IMPORT) it lets one rank of a run die or stop: BLACKMAMBA_DRILL=kill:1:11 kills rank 1 as it
begins step 11, and `stop` puts it to sleep there.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

DRILL = "BLACKMAMBA_DRILL"
SKIPPED_CALL = 3


@contextmanager
def planted(fault: str, rank: int) -> Iterator[None]:
    """Plant a fault meanwhile; an empty name plants none."""
    with ExitStack() as stack:
        if fault:
            FAULTS[fault](stack, rank)
        yield


def _early_gradients(stack: ExitStack, rank: int) -> None:
    """Reduce gradients as they were when the first of their bucket was ready, as on a stream that waits for nothing."""
    group = _bucket_group()
    register, start = group.register_grad_ready, group.start_grad_sync
    early: dict[int, list[Tensor]] = {}

    def register_and_read(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.is_last_microbatch and not self.per_param_grad_ready_counts:
            early[id(self)] = [bucket.grad_data.clone() for bucket in self.buckets]
        register(self, *args, **kwargs)

    def start_with_early(self: Any, *args: Any, **kwargs: Any) -> None:
        for bucket, data in zip(self.buckets, early.pop(id(self), ()), strict=False):
            bucket.grad_data.copy_(data)
        start(self, *args, **kwargs)

    stack.enter_context(mock.patch.object(group, "register_grad_ready", register_and_read))
    stack.enter_context(mock.patch.object(group, "start_grad_sync", start_with_early))


def _late_weights(stack: ExitStack, rank: int) -> None:
    """Deliver gathered weights after the forward pass that should have waited for them."""
    group = _bucket_group()
    start, finish = group.start_param_sync, group.finish_grad_sync
    arrived: list[tuple[Tensor, Tensor]] = []

    class Late:
        """A handle whose wait does nothing."""

        def wait(self) -> None:
            pass

    def start_late(self: Any, *args: Any, **kwargs: Any) -> None:
        buffers = [bucket.param_data for bucket in self.buckets]
        stale = [buffer.clone() for buffer in buffers]
        start(self, *args, **kwargs)
        if self.param_gather_handle is not None:
            self.param_gather_handle.wait()
            self.param_gather_handle = Late()
            for buffer, old in zip(buffers, stale, strict=True):
                arrived.append((buffer, buffer.clone()))
                buffer.copy_(old)

    def finish_and_deliver(self: Any, *args: Any, **kwargs: Any) -> None:
        finish(self, *args, **kwargs)
        for buffer, new in arrived:
            buffer.copy_(new)
        arrived.clear()

    stack.enter_context(mock.patch.object(group, "start_param_sync", start_late))
    stack.enter_context(mock.patch.object(group, "finish_grad_sync", finish_and_deliver))


def _skipped_collective(stack: ExitStack, rank: int) -> None:
    """Rank 1 does not take part in one all-reduce of all ranks."""
    real, calls = dist.all_reduce, [0]

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if rank == 1 and calls[0] == SKIPPED_CALL:
            return None
        return real(tensor, *args, **kwargs)

    stack.enter_context(mock.patch.object(dist, "all_reduce", all_reduce))


def _sleeping_rank(stack: ExitStack, rank: int) -> None:
    """Rank 1 stops before its third all-reduce."""
    real, calls = dist.all_reduce, [0]

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if rank == 1 and calls[0] == SKIPPED_CALL:
            time.sleep(1000)
        return real(tensor, *args, **kwargs)

    stack.enter_context(mock.patch.object(dist, "all_reduce", all_reduce))


FAULTS = {
    "early_gradients": _early_gradients,
    "late_weights": _late_weights,
    "skipped_collective": _skipped_collective,
    "sleeping_rank": _sleeping_rank,
}


def _bucket_group() -> type:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    return _ParamAndGradBucketGroup


def _drill() -> None:
    """Replace the trainer's step by one that dies or stops as BLACKMAMBA_DRILL says."""
    what, rank, number = os.environ[DRILL].split(":")

    from megatron_blackmamba.training.loop import Trainer

    take_step = Trainer.take_step

    def take(self: Trainer) -> Any:
        if self.world.rank == int(rank) and self.progress.step + 1 == int(number):
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        return take_step(self)

    Trainer.take_step = take  # type: ignore[method-assign]


if os.environ.get(DRILL):
    _drill()
