"""Muon in the place of Adam, told which ranges of which weights this rank's shards are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from megatron_blackmamba import optimizers
from megatron_blackmamba.config import mup
from megatron_blackmamba.engine.adam import Adam
from megatron_blackmamba.engine.checked import replace
from megatron_blackmamba.engine.muon import Heads, Matrix, Muon, Range, Shared, matrices_of
from megatron_blackmamba.engine.parts.optimizer import Built
from megatron_blackmamba.layers import Stack
from megatron_blackmamba.ops.orthogonal import flops
from megatron_blackmamba.optimizers import OptimizerKind
from megatron_blackmamba.optimizers.base import DECLARED
from megatron_blackmamba.settings import OptimizerConfig

from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection


@contextmanager
def in_place_of_adam(kind: OptimizerKind, settings: OptimizerConfig) -> Iterator[None]:
    """Have megatron-core build Muon where it would build Adam."""
    if not kind.by_matrix:
        yield
        return
    moments = torch.bfloat16 if settings.moments == "bf16" else None
    ours = partial(Muon, moments=moments, momentum=settings.momentum, steps=settings.newton_schulz)
    with mock.patch.object(megatron_optimizer, "Adam", ours), mock.patch.object(distrib_optimizer, "Adam", Adam):
        yield


def know_matrices(built: Built, groups: ProcessGroupCollection) -> dict[str, Tensor]:
    """Tell each Muon the matrices of its weights, and the groups over which they are spread.

    Returns by attention layer where the largest logits of its heads are noted, if `qk_clip` asks for them.
    """
    noted: dict[str, Tensor] = {}
    for part in built.distributed:
        if not part.is_stub_optimizer and isinstance(part.optimizer, Muon):
            weights = [parameter for buffer in part.buffers for parameter in buffer.param_index_map]
            if not weights:  # that of the experts, on a pipeline stage without any
                continue
            of_experts = any(isinstance(getattr(weight, DECLARED, None), Stack) for weight in weights)
            full = torch.promote_types(weights[0].dtype, torch.float32)
            part.optimizer.share(
                _shared(built, part, groups),
                part.data_parallel_group,
                groups.expt_tp if of_experts else groups.tp,
                weights[0].new_empty(0, dtype=full),
            )
            replace(part, "init_state_fn", partial(_fill, part.init_state_fn))
            if (cap := built.settings.qk_clip) is not None:
                layers = dict(_layers(built, part, groups))
                part.optimizer.clip_heads(list(layers.values()), cap)
                noted |= {name: heads.largest_H for name, heads in layers.items()}
    return noted


def _fill(fill: Callable[..., None], optimizer: Muon, *config: Any) -> None:
    """Fill in the state before the first update, which is saved and loaded under the same names as later ones."""
    fill(optimizer, *config)
    optimizer.keep_momentum_alone()


def products_of(buffer: Any, settings: OptimizerConfig, groups: ProcessGroupCollection) -> int:
    """Return the FLOPs of this rank's share of the matrices in a buffer, if all ranks have as many."""
    found = 0
    if optimizers.kind_of(settings.kind).by_matrix:
        for weight in buffer.param_index_map:
            for matrix in _matrices(weight, settings, groups):
                ranks = (groups.expt_tp if isinstance(getattr(weight, DECLARED, None), Stack) else groups.tp).size()
                rows = matrix.rows * (ranks if matrix.axis == 0 else 1)
                found += flops(rows, matrix.columns * (ranks if matrix.axis == 1 else 1), settings.newton_schulz)
    return found // buffer.data_parallel_group.size()


def _shared(built: Built, part: DistributedOptimizer, groups: ProcessGroupCollection) -> Iterator[Shared]:
    shards, config = dict(_shards(part)), cast(Any, built.model.config)
    names = {parameter: name for name, parameter in built.model.named_parameters()}
    for buffer in part.buffers:
        for parameter in buffer.param_index_map:
            if matrices := _matrices(parameter, built.settings, groups):
                scales = mup.update_scales(names[parameter], config.described)
                matrices = [m._replace(scale=scales[i % len(scales)]) for i, m in enumerate(matrices)]
                yield Shared(shards.get(parameter), owned(buffer, parameter), matrices)


def _layers(built: Built, part: DistributedOptimizer, groups: ProcessGroupCollection) -> Iterator[tuple[str, Heads]]:
    """Yield the attention layers of which a part updates the queries and keys, and have them note their logits."""
    mixers = {name: mixer for name, mixer in built.model.named_modules() if hasattr(mixer, "core_attention")}
    buffers, shards = (
        {weight: buffer for buffer in part.buffers for weight in buffer.param_index_map},
        dict(_shards(part)),
    )
    for name, mixer in mixers.items():
        weight = mixer.linear_qkv.weight
        if weight in buffers:
            declared = getattr(weight, DECLARED).share(groups.tp.size())
            channels = declared.rows["k"][0]
            queries = declared.rows["q"][0] // channels
            full = torch.promote_types(weight.dtype, torch.float32)
            mixer.core_attention.largest_H = weight.new_full((declared.groups * queries,), -torch.inf, dtype=full)
            here = owned(buffers[weight], weight)[part.data_parallel_group.rank()]
            shape = declared.groups, queries, channels, weight.shape[1]
            yield name, Heads(shards.get(weight), here, shape, mixer.core_attention.largest_H)


def _matrices(parameter: Any, settings: OptimizerConfig, groups: ProcessGroupCollection) -> list[Matrix]:
    """Return the matrices of a rank's weight; none if Adam updates it."""
    if not optimizers.kind_of(settings.kind).orthogonalizes(parameter):
        return []
    declared, axis = getattr(parameter, DECLARED, None), None
    if isinstance(declared, Stack):
        declared = declared.share(groups.ep.size(), groups.expt_tp.size())
    elif declared is not None:
        declared = declared.share(groups.tp.size())
    elif getattr(parameter, "tensor_model_parallel", False):
        axis = parameter.partition_dim
    return matrices_of(parameter.shape, declared, axis, settings.matrices == "whole")


def owned(buffer: Any, parameter: Tensor) -> list[Range]:
    """Return the range of a parameter's elements that each data-parallel rank owns."""
    first, last = buffer.param_index_map[parameter][:2]
    bucket = next(b for b in buffer.buckets if b.offset <= first < b.offset + b.grad_data.numel())
    ranks = buffer.data_parallel_group.size()
    size, found = bucket.grad_data.numel() // ranks, []
    for rank in range(ranks):
        start = max(first, bucket.offset + rank * size)
        end = min(last, bucket.offset + (rank + 1) * size)
        found.append((start - first, max(start, end) - first))
    return found


def _shards(part: DistributedOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter that this rank owns a range of, with the shard that the optimizer updates."""
    for parameter, (group, place) in part.model_param_group_index_map.items():
        if parameter in part.model_param_gbuf_map:
            yield parameter, part.optimizer.param_groups[group]["params"][place]
