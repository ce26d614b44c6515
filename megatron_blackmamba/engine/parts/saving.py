"""megatron-core's plan of a save and its writer of files, without its way of running that writer; news of a load.

There, a rank that fails between two exchanges leaves the others waiting, a killed writer is waited for without end, and
writers survive the rank that started them. `checkpoint/writing.py` runs the writer instead.
"""

import inspect
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import DefaultLoadPlanner

from megatron_blackmamba.engine.checked import private, require

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

Planned = tuple[FileSystemWriterAsync, Any]
"""The writer of this rank's shard, and the table of contents, which rank 0 has."""


class _Plan(TorchDistSaveShardedStrategy):
    """A save that ends with its plan."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, plan: Any, *ignored: Any) -> Planned:
        _, table, _ = plan
        return writer, table


WRITER = {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(_Plan.async_save).parameters else {}
"""From 0.17 on the writer has to be named, and the default is that of a package which is not required."""


def plan_save(state: dict, folder: str, replicas: ProcessGroup | None) -> Planned:
    """Plan who writes what; `replicas` share the writing of the state.

    megatron-core would start a server process for a queue that nothing here uses, so another queue stands in for it
    while it plans. A save by megatron-core itself needs its own.
    """
    require(filesystem_async, "_results_queue")
    require(TorchDistSaveShardedStrategy, "_get_save_and_finalize_callbacks")
    strategy: Any = _Plan()
    if replicas is not None:
        strategy = FullyParallelSaveStrategyWrapper(strategy, replicas, do_cache_distribution=True)
    with mock.patch.object(filesystem_async, "_results_queue", queue.Queue()):
        return strategy.async_save(state, folder, **WRITER)


@contextmanager
def each_tensor_read(call: Callable[[], None]) -> Iterator[None]:
    """Call after each tensor that a load inside the block has read: PyTorch's hook for that does nothing by itself."""
    require(DefaultLoadPlanner, "commit_tensor")
    with mock.patch.object(DefaultLoadPlanner, "commit_tensor", lambda planner, item, tensor: call()):
        yield


def function_of(writer: FileSystemWriterAsync) -> Callable[[Any], list[Any]]:
    """Return a function that writes a bucket and returns torch's WriteResults.

    megatron-core answers through queues, since it would run this in a process of its own.
    """
    write_bucket = private(writer, "write_preloaded_data")
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []

    def write(bucket: Any) -> list[Any]:
        answers: queue.Queue[Any] = queue.Queue()
        count: queue.Queue[Any] = queue.Queue()
        count.put(0)
        write_bucket(transforms, 0, bucket, answers, count, True)
        _, results = answers.get_nowait()
        if isinstance(results, Exception):
            raise results
        return results

    return write
