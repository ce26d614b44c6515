"""Initial weights: every value follows from the run's seed and the parameter's global name, never from the layout.

Each rank draws the whole parameter (of an expert, the whole expert) and keeps its shard: the same model on one laptop
core and on 256 GPUs.
"""

import math
from collections.abc import Iterator

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.runtime.seeding import generator

WRITES_TO_RESIDUAL = ("out_proj.weight", "fc2", "linear_fc2.weight", "linear_proj.weight")


@torch.no_grad()
def initialise(model: MegatronModule, described: ModelConfig, seed: int) -> None:
    """Fill every parameter of a (stage and shard of a) model."""
    whole: tuple[str, Tensor] | None = None
    for shard in shards(model.sharded_state_dict()):
        key, shape, offset = shard.key, tuple(shard.global_shape), tuple(shard.global_offset)
        if ".experts." in key:
            for local, expert in enumerate(range(offset[0], offset[0] + shard.local_shape[0])):
                drawn = draw(f"{key}.{expert}", shape[1:], described, seed)
                _keep(shard.data[local], drawn, offset[1:])
        else:
            if whole is None or whole[0] != key:  # the two halves of in_proj come one after the other
                whole = (key, draw(key, shape, described, seed))
            _keep(shard.data, whole[1], offset)


def draw(name: str, shape: tuple[int, ...], model: ModelConfig, seed: int) -> Tensor:
    """The initial value of a whole parameter, fp32."""
    init, random = model.init, generator(seed, name)
    kind = _without_expert(name)
    if kind.endswith(("norm.weight", ".D")):
        return torch.ones(shape)
    if kind.endswith(("norm.bias", "router.bias")):
        return torch.zeros(shape)
    if kind.endswith(".A_log"):
        return torch.log(torch.arange(1, shape[1] + 1, dtype=torch.float32)).expand(shape)
    if kind.endswith("dt_proj.bias"):
        low, high = math.log(init.dt_min), math.log(init.dt_max)
        dt = torch.exp(torch.rand(shape, generator=random) * (high - low) + low).clamp(min=init.dt_floor)
        return dt + torch.log(-torch.expm1(-dt))  # softplus of this is dt
    if kind.endswith("dt_proj.weight"):
        return _uniform(shape, model.dt_rank_or_default**-0.5, random)
    if kind.endswith(("conv1d.weight", "conv1d.bias")):
        return _uniform(shape, model.conv_kernel**-0.5, random)
    std = init.std
    if init.scale_outputs_by_depth and kind.endswith(WRITES_TO_RESIDUAL):
        std /= math.sqrt(2 * model.layers)
    return torch.randn(shape, generator=random) * std


def shards(state: dict) -> Iterator[ShardedTensor]:
    """The sharded tensors of a model's sharded state dict, those made by factories included."""
    for value in nested_values(state):
        if isinstance(value, ShardedTensorFactory):
            yield from nested_values(value.build())
        elif isinstance(value, ShardedTensor):
            yield value


def _uniform(shape: tuple[int, ...], bound: float, random: torch.Generator) -> Tensor:
    return (torch.rand(shape, generator=random) * 2 - 1) * bound


def _keep(shard: Tensor, whole: Tensor, offset: tuple[int, ...]) -> None:
    here = tuple(slice(start, start + size) for start, size in zip(offset, shard.shape, strict=True))
    shard.copy_(whole[here])


def _without_expert(name: str) -> str:
    head, _, last = name.rpartition(".")
    return head if last.isdigit() else name
