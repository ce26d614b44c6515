"""Initial weights: every value follows from the run's seed and the parameter's global name, never from the layout.

Each rank draws the whole parameter (of an expert, the whole expert) and keeps its shard: the same model on one laptop
core and on 256 GPUs.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_blackmamba import norms
from megatron_blackmamba.config import ModelConfig, mup
from megatron_blackmamba.layers import SCALINGS, mixer_of, stacks_of
from megatron_blackmamba.runtime.seeding import generator

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule


@torch.no_grad()
def initialise(model: MegatronModule, described: ModelConfig, seed: int) -> None:
    """Fill every parameter of a (stage and shard of a) model."""
    whole: tuple[str, Tensor] | None = None
    stacks = stacks_of(described)
    for shard in shards(model.sharded_state_dict()):
        key, shape, offset = shard.key, tuple(shard.global_shape), tuple(shard.global_offset)
        if key in stacks:
            for local, number in enumerate(range(offset[0], offset[0] + shard.local_shape[0])):
                drawn = draw(key, shape[1:], described, seed, number)
                _keep(shard.data[local], drawn, offset[1:])
        else:
            if whole is None or whole[0] != key:  # its pieces come one after the other
                whole = (key, draw(key, shape, described, seed))
            _keep(shard.data, whole[1], offset)


def draw(name: str, shape: tuple[int, ...], model: ModelConfig, seed: int, number: int | None = None) -> Tensor:
    """Return the initial value of a whole parameter, fp32; of a stack, that of one entry."""
    init, random = model.init, generator(seed, name if number is None else f"{name}.{number}")
    if name.startswith(norms.PREFIX):
        ones = name.removeprefix(norms.PREFIX) in norms.kind_of(model.final_norm).ones
        return torch.ones(shape) if ones else torch.zeros(shape)
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith("norm.bias"):
        return torch.zeros(shape)
    std, mixer = init.std, mixer_of(name, model)
    if mixer is None and name.endswith(SCALINGS):
        return torch.ones(shape) if name.endswith("scale") else torch.zeros(shape)
    if mixer:
        kind, own = mixer
        value = kind.initial(own, shape, model, random)
        if value is not None:
            return value
        if init.scale_outputs_by_depth and own.endswith(kind.writes_to_residual):
            std /= math.sqrt(2 * model.layers)
    return mup.scale_initial(torch.randn(shape, generator=random) * std, name, model)


def shards(state: dict) -> Iterator[ShardedTensor]:
    """Yield the sharded tensors of a model's sharded state dict, including those made by factories."""
    for value in nested_values(state):
        if isinstance(value, ShardedTensorFactory):
            yield from nested_values(value.build())
        elif isinstance(value, ShardedTensor):
            yield value


def _keep(shard: Tensor, whole: Tensor, offset: tuple[int, ...]) -> None:
    here = tuple(slice(start, start + size) for start, size in zip(offset, shard.shape, strict=True))
    shard.copy_(whole[here])
