"""The distributed optimizer's state as each rank holds it: saved and loaded without gathering.

A rank owns a contiguous range of the elements of some parameters. Such a range is a few boxes of the parameter's shape,
and a checkpoint takes boxes of any size. The files therefore describe whole parameters, which any layout can load.
megatron-core gathers the whole state on every data-parallel rank instead, in host memory, and saves whole parameters.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.engine.checked import replace, require
from megatron_blackmamba.engine.parts.optimizer import Built

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

SAVE, LOAD = "sharded_param_state_fully_reshardable", "load_parameter_state_from_fully_reshardable"
"""The methods of megatron-core's optimizer that `own_shards` and `load_own_shards` stand in for."""

Boxes = dict[int, ShardedTensor]
Shards = dict[int, dict[str, Boxes]]
"""For each parameter that the rank owns a part of, in order: the boxes of that part for each state, such as exp_avg."""


def save_own_shards(built: Built) -> None:
    """Save and load what each rank holds. A checkpoint made either way loads the same."""
    for part in built.distributed:
        require(part, "_get_main_param_and_optimizer_states", "_set_main_param_and_optimizer_states")
        replace(part, SAVE, partial(own_shards, part))
        replace(part, LOAD, partial(load_own_shards, part))


def own_shards(optimizer: DistributedOptimizer, weights: dict, is_loading: bool = False, *_: Any, **__: Any) -> Shards:
    """Return this rank's part of the optimizer's state: its own tensors to save, or empty ones to load into.

    weights: the model's sharded weights, which say where each parameter lies in the unsharded one.
    """
    sharded = entries_of(weights)
    state: Shards = {}
    for number, (parameter, start, end) in enumerate(_owned(optimizer)):
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        state[number] = {
            name: dict(enumerate(boxes_of(sharded[parameter], name, start, end, values, is_loading)))
            for name, values in tensors.items()
            if isinstance(values, Tensor) and name != "step"  # which the groups keep
        }
    return state


@torch.no_grad()
def load_own_shards(optimizer: DistributedOptimizer, state: dict[int, dict[str, dict[int, Tensor]]]) -> None:
    """Copy loaded boxes into the optimizer, in the order of `own_shards`."""
    for number, (parameter, _, _) in enumerate(_owned(optimizer)):
        parts = {
            name: torch.cat([boxes[place].flatten() for place in sorted(boxes)])
            for name, boxes in state[number].items()
        }
        optimizer._set_main_param_and_optimizer_states(parameter, parts)


def entries_of(weights: dict) -> dict[Tensor, ShardedTensor | ShardedTensorFactory]:
    """Return the entry of each parameter in the model's sharded weights."""
    kinds = ShardedTensor, ShardedTensorFactory
    return {entry.data: entry for entry in nested_values(weights) if isinstance(entry, kinds)}


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offset and size of the boxes that hold elements `start` to `end` of a row-major tensor, in their order."""
    if start >= end:
        return
    if len(shape) < 2:
        yield (start,)[: len(shape)], (end - start,)[: len(shape)]
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows
    if first > last:  # all inside one row
        yield from _in_row(shape, last, start, end)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * row, end)


def _in_row(
    shape: Sequence[int], number: int, start: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    before = number * math.prod(shape[1:])
    for offset, size in boxes(shape[1:], start - before, end - before):
        yield (number, *offset), (1, *size)


def _owned(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """Yield the parameters that this rank owns elements of, with the range of these elements."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def boxes_of(
    weight: ShardedTensor | ShardedTensorFactory,
    state: str,
    start: int,
    end: int,
    values: Tensor,
    is_loading: bool,
    replicated: bool = False,
) -> Iterator[ShardedTensor]:
    """Yield the boxes of elements `start` to `end` of a weight, with their values unless loading.

    replicated: whether the other data-parallel ranks have the same values.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)  # bf16 moments are stored as every other
    if values.numel() != end - start:
        raise RuntimeError(
            f"{state} of {weight.key}: {values.numel()} values must match the size of the shard, {end - start}"
        )
    for piece, first in _pieces(weight, dtype):
        begin, stop = max(start, first), min(end, first + piece.data.numel())
        at = begin - start
        for offset, size in boxes(piece.local_shape, begin - first, stop - first):
            here = values.detach().view(-1)[at : at + math.prod(size)].view(size)
            at += math.prod(size)
            if is_loading:
                here = torch.empty(size, dtype=dtype)
            elif here.dtype is not dtype:
                here = here.cpu().to(dtype)
            yield ShardedTensor(
                key=f"optimizer.state.{state}.{piece.key}",
                data=here,
                dtype=dtype,
                local_shape=size,
                global_shape=piece.global_shape,
                global_offset=tuple(a + b for a, b in zip(piece.global_offset, offset, strict=True)),
                axis_fragmentations=None,  # boxes of any size
                replica_id=piece.replica_id if replicated else (*piece.replica_id[:2], 0),
            )


def _pieces(weight: ShardedTensor | ShardedTensorFactory, dtype: torch.dtype) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield the boxes of the unsharded weight that a rank's weight consists of, each with its place in the latter."""
    whole = torch.empty(weight.data.shape, dtype=dtype, device="meta")
    entry = dataclasses.replace(
        weight, data=whole, **({} if isinstance(weight, ShardedTensorFactory) else {"dtype": dtype})
    )
    for piece in nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]:
        if not piece.data.is_contiguous() or piece.prepend_axis_num:
            raise NotImplementedError(
                f"the optimizer's state of {piece.key} cannot be saved: its shard is no range of the rank's elements."
                " Divide the weight along its first axis (`by_rows`, docs/extending.md)."
            )
        yield piece, int(piece.data.storage_offset())
