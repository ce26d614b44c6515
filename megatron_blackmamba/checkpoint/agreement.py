"""The ranks' agreement about files that they write together: if one fails, all raise the same error, and none waits."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_blackmamba.checkpoint.writing import reason
from megatron_blackmamba.runtime import device
from megatron_blackmamba.runtime.world import World, gathered

T = TypeVar("T")


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
