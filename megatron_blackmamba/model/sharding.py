"""How parameters are spread over ranks, as kinds declare weights: marks that megatron-core reads, and checkpoints.

A parameter is sharded over the tensor-parallel group along one axis, or replicated in it. Replicated ones whose inputs
are split along the sequence need their gradients summed over the group: `sequence_parallel`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.layers import LayerKind, Stack, Weight
from megatron_blackmamba.optimizers.base import BY_ADAM, DECLARED, NO_DECAY
from megatron_blackmamba.registry import KindError
from megatron_blackmamba.runtime import device

from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import sharded_state_dict_default
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint


def sharded(parameter: Tensor, axis: int) -> None:
    """Mark as split over the tensor-parallel group along `axis`."""
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis, stride=1)


def replicated(parameter: Any, sequence_parallel: bool) -> nn.Parameter:
    """Mark a parameter as equal on every rank of the tensor-parallel group."""
    parameter.sequence_parallel = sequence_parallel
    return parameter


def without_decay(parameter: nn.Parameter) -> nn.Parameter:
    """Exempt a parameter from weight decay."""
    setattr(parameter, NO_DECAY, True)
    return parameter


def empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Return an uninitialised parameter on the device of this process (or on the meta device, when planning)."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device.device()))


def declare(mixer: nn.Module, name: str, kind: LayerKind, model: ModelConfig, groups: ProcessGroupCollection) -> None:
    """Mark every parameter as its kind declares it; refuse what the kind does not declare, or declares wrongly."""
    kind.shapes(model)
    declared, state = kind.stored(model), mixer.state_dict(keep_vars=True)
    has = {own: tensor for own, tensor in state.items() if not own.endswith("_extra_state")}  # of Transformer Engine

    def refuse(own: str, why: str) -> NoReturn:
        raise KindError(f"{name}.{own}: {why}. Correct {type(kind).__name__}.weights (docs/extending.md).")

    for own in declared.keys() - has.keys():
        refuse(own, f"{type(kind).__name__}.weights declares it, but the mixer has no such parameter")
    for own, tensor in has.items():
        weight = declared.get(own)
        if weight is None:
            refuse(own, f"{type(kind).__name__}.weights does not declare its rows, nor how they are spread")
        here = share(weight, groups).shape
        if tuple(tensor.shape) != here:
            refuse(
                own, f"its shape is {tuple(tensor.shape)}, and {type(kind).__name__}.weights says {here} on this rank"
            )
        marked = tensor.partition_dim if getattr(tensor, "tensor_model_parallel", False) else None
        if marked not in (None, weight.axis):
            refuse(own, f"its module splits axis {marked}, and {type(kind).__name__}.weights says {weight.axis}")
        if marked is None and weight.axis is not None:
            sharded(tensor, weight.axis)
        if isinstance(tensor, nn.Parameter):
            setattr(tensor, DECLARED, weight)
            setattr(tensor, BY_ADAM, own.endswith(kind.by_adam))


def share(weight: Weight | Stack, groups: ProcessGroupCollection) -> Weight | Stack:
    """Return what this rank holds of a weight."""
    if isinstance(weight, Stack):
        return weight.share(groups.ep.size(), groups.expt_tp.size())
    return weight.share(groups.tp.size())


def sharded_mixer(
    mixer: nn.Module,
    declared: Mapping[str, Weight | Stack],
    prefix: str,
    metadata: dict | None,
    groups: ProcessGroupCollection,
) -> dict:
    """Return the sharded tensors of a mixer, as its kind declares them."""
    dense = {"tp_group": groups.tp, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
    state: dict = {}
    for name, tensor in mixer.state_dict(keep_vars=True).items():
        weight, key = declared.get(name), f"{prefix}{name}"
        if isinstance(weight, Stack):
            axes = [(0, groups.ep), (weight.axis, groups.expt_tp)]
            offsets = [(axis, group.rank(), group.size()) for axis, group in axes]
            state[key] = ShardedTensor.from_rank_offsets(
                key, tensor, *offsets, replica_id=(0, 0, groups.expt_dp.rank())
            )
        elif weight is not None and weight.axis is None:
            state[key] = make_sharded_tensor_for_checkpoint(tensor, key, **dense)
        elif weight is not None:
            state[key] = make_tp_sharded_tensor_for_checkpoint(tensor, key, weight.axis, **dense)
            if weight.axis == 0 and len(weight.pieces) > 1:
                shares = [rows // groups.tp.size() for rows in weight.pieces]
                state[key] = _sharded_by_pieces(state[key], shares, groups.tp.rank())
    return state


def _sharded_by_pieces(whole: ShardedTensor, parts: Sequence[int], rank: int) -> ShardedTensorFactory:
    """Shard each piece of the rows by itself, so that any layout can load the checkpoint.

    whole: this rank's rows, which are its shares of all pieces, one behind the other. parts: rows of each share.
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
