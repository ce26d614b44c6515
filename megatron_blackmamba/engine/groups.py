"""Process groups without idle threads: on CPUs, the groups in which a rank is alone are one group."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from megatron_blackmamba.engine.checked import private


@contextmanager
def shared_alone() -> Iterator[None]:
    """Have megatron-core reuse groups of one rank while it lays its groups.

    It makes a group for each kind of parallelism: 17 for a process alone. Each gloo group has three threads, one of
    which wakes a hundred times a second; together they took 2.7% of a core. A group of one rank exchanges nothing, so
    all of these can be the same. NCCL opens a group's connections only when it is used.
    """
    from megatron.core import parallel_state

    create = private(parallel_state, "create_group")
    of_rank: dict[int, Any] = {}

    def create_once(ranks: Any = None, *args: Any, **options: Any) -> Any:
        if ranks is None or len(ranks) != 1:
            return create(ranks, *args, **options)
        if ranks[0] not in of_rank:
            of_rank[ranks[0]] = create(ranks, *args, **options)
        return of_rank[ranks[0]]

    with mock.patch.object(parallel_state, "create_group", create_once):
        yield
