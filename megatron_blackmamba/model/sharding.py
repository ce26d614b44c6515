"""Marks on parameters that megatron-core reads, and ours.

A parameter is sharded over the tensor-parallel group along one axis, or replicated in it. Replicated ones whose inputs
are split along the sequence need their gradients summed over the group: `sequence_parallel`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_blackmamba.optimizers.base import NO_DECAY, STACKED
from megatron_blackmamba.runtime import device

from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default


def sharded(parameter: nn.Parameter, axis: int) -> nn.Parameter:
    """Split over the tensor-parallel group along `axis`."""
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis, stride=1)
    return parameter


def replicated(parameter: Any, sequence_parallel: bool) -> nn.Parameter:
    """Mark a parameter as equal on every rank of the tensor-parallel group."""
    parameter.sequence_parallel = sequence_parallel
    return parameter


def without_decay(parameter: nn.Parameter) -> nn.Parameter:
    """Exempt a parameter from weight decay."""
    setattr(parameter, NO_DECAY, True)
    return parameter


def stacked(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter as a stack of matrices along its first axis."""
    setattr(parameter, STACKED, True)
    return parameter


def empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Return an uninitialised parameter on the device of this process (or on the meta device, when planning)."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device.device()))


def sharded_by_parts(whole: ShardedTensor, parts: Sequence[int], rank: int) -> ShardedTensorFactory:
    """Shard each part of the rows by itself, so that any layout can load the checkpoint.

    whole: this rank's rows, which are its shares of all parts, one behind the other. parts: rows of each share.
    """
    ranks = whole.global_shape[0] // sum(parts)

    def build(key: str, data: Tensor, replica_id: ReplicaId, flattened_range: slice | None) -> list[ShardedTensor]:
        shards, first = [], 0
        for share in data.split(parts):
            offset = (first * ranks + rank * len(share), *[0] * (data.dim() - 1))
            shape = tuple(share.shape)
            shards.append(
                ShardedTensor(key, share, data.dtype, shape, whole.global_shape, offset, None, replica_id=replica_id)
            )
            first += len(share)
        return shards

    return ShardedTensorFactory(whole.key, whole.data, build, torch.cat, whole.replica_id)


def sharded_modules(
    modules: Mapping[str, nn.Module], prefix: str, offsets: tuple, metadata: dict | None, tp_group: ProcessGroup
) -> dict:
    """Return the sharded tensors of modules by their names, which end in a dot."""
    state: dict = {}
    for name, module in modules.items():
        state |= sharded_state_dict_default(module, f"{prefix}{name}", offsets, metadata, tp_group=tp_group)
    return state


def sharded_mixer(
    mixer: nn.Module,
    own: Sequence[str],
    modules: Sequence[str],
    prefix: str,
    offsets: tuple,
    metadata: dict | None,
    tp_group: ProcessGroup,
) -> dict:
    """Return the sharded tensors of a mixer.

    own: names of parameters that are split along their first axis. modules: names of modules that shard themselves.
    """
    parameters = dict(mixer.named_parameters())
    state: dict = make_sharded_tensors_for_checkpoint(
        {name: parameters[name] for name in own},
        prefix,
        dict.fromkeys(own, 0),
        offsets,
        tp_group=tp_group,
        dp_cp_group=(metadata or {}).get("dp_cp_group"),
    )
    children = {f"{name}.": mixer.get_submodule(name) for name in modules}
    return state | sharded_modules(children, prefix, offsets, metadata, tp_group)


def mark_linears(model: nn.Module) -> None:
    """Mark the weights of megatron-core's own layers as sharded.

    0.16 does so itself only where it initialises them; unmarked, all but one rank's shards would be missing from the
    gradient norm.
    """
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding, RowParallelLinear)):
            weight = module.weight
            if weight is not None and not hasattr(weight, "tensor_model_parallel"):
                sharded(weight, 1 if isinstance(module, RowParallelLinear) else 0)
