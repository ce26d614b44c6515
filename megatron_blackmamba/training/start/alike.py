"""Refuse ranks that were started differently: with another config, other code or other data.

Each rank reads its own command line and files. A rank with another learning rate would update its part of the weights
with it, and every replica would agree on the result: nothing later would notice.
"""

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.runtime.facts import versions
from megatron_blackmamba.runtime.world import PlaceError, gathered

SHOWN = 4
LOCAL = {"path", "file"}
"""Keys of a data record that are no part of the content."""


def refuse_unlike_starts(config: RunConfig) -> None:
    """Raise PlaceError on every rank unless all have the same config and software. Every rank calls this."""
    mine = {**dict(_flat(config.model_dump(mode="json", by_alias=True))), **versions()}
    _refuse_unlike(mine, "Start every rank with the same command, the same files and the same installation.")


def refuse_unlike_data(record: Mapping[str, Any]) -> None:
    """Raise PlaceError on every rank unless all opened the same data (as DataPlan.record). Every rank calls this."""
    _refuse_unlike(dict(_flat(record, "data.")), "Give every node the same file of data.mixture and the same shards.")


def _refuse_unlike(mine: Mapping[str, Any], remedy: str) -> None:
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return
    digests = gathered(hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    everyone = gathered((socket.gethostname(), mine))
    counted = Counter(digests).most_common()
    majority = counted[0][1] > counted[1][1]
    usual = digests.index(counted[0][0]) if majority else 0
    lines = _shortened(list(_differences(everyone, usual)))
    raise PlaceError("\n".join(["the ranks of this run were started differently:", *lines, remedy]))


def _differences(everyone: Sequence[tuple[str, Mapping[str, Any]]], usual: int) -> Iterator[str]:
    """Yield a line for each key in which a rank differs from the usual one."""
    host, values = everyone[usual]
    for rank, (its_host, its_values) in enumerate(everyone):
        for key in {**values, **its_values}:
            if (its := its_values.get(key)) != (other := values.get(key)):
                yield f"  {key} is {its} on rank {rank} ({its_host}) and {other} on rank {usual} ({host})."


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - SHOWN
    return [*lines[:SHOWN], f"  and {more} more differences."] if more > 0 else lines


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of nested mappings and lists, without paths in a data record."""
    if isinstance(value, Mapping | list) and value:
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            if key not in LOCAL:
                yield from _flat(inner, f"{prefix}{key}.")
    else:
        yield prefix.removesuffix("."), value
