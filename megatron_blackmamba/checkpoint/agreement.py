"""The ranks' agreement about files that they write or read together: if one fails, all raise the same error.

No rank waits for one that has failed, and none takes one that is slow for one that hangs.
"""

import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_blackmamba.checkpoint.writing import reason
from megatron_blackmamba.runtime import device
from megatron_blackmamba.runtime.world import World, gathered

T = TypeVar("T")
POLL_SECONDS = 0.5


class SaveError(OSError):
    """A checkpoint or an export that could not be written. The ones before it are as they were."""


def together(world: World, on_main: Callable[[], None], what: str) -> None:
    """Have rank 0 do it; if that fails, every rank raises SaveError."""
    failed: list[str | None] = [None]
    if world.is_main:
        try:
            on_main()
        except Exception as error:
            failed[0] = f"{what}: {reason(error)}"
    dist.broadcast_object_list(failed, src=0, device=device.device())
    if failed[0] is not None:
        raise SaveError(failed[0])


def while_any_moves(
    world: World, alive: Callable[[str], None], what: str, work: Callable[[Callable[[], None]], T]
) -> T:
    """Do work that may take ranks different times. All ranks count as alive while the work of any of them moves.

    work: Called in a thread, with a function that it calls after each bit of progress.
    """
    moved, ended = threading.Event(), futures.Future[T]()

    def run() -> None:
        try:
            ended.set_result(work(moved.set))
        except BaseException as error:
            ended.set_exception(error)

    alive(what)
    threading.Thread(target=run, name=what, daemon=True).start()
    while world.any_rank(not futures.wait([ended], POLL_SECONDS).done):
        moves = moved.is_set()
        moved.clear()
        if world.any_rank(moves):
            alive(f"waiting for another rank: {what}" if ended.done() else what)
    return ended.result()


def found_by_main(world: World, find: Callable[[], T]) -> T:
    """Return what rank 0 finds; if that fails, every rank raises its error."""
    found: list[Any] = [None, None]
    if world.is_main:
        try:
            found[0] = find()
        except Exception as error:
            found[1] = error
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise found[1]
    return found[0]


def each(world: World, on_every: Callable[[], None], what: str) -> None:
    """Have every rank do it; if one fails, every rank raises SaveError, after all have ended."""
    failed = None
    try:
        on_every()
    except Exception as error:
        failed = reason(error)
    for rank, problem in enumerate(gathered(failed)):
        if problem is not None:
            raise SaveError(f"{what}: rank {rank}: {problem}")
