"""Clipping, Adam and the casts from and to bf16 in one pass over memory, where this project's Adam can do them.

megatron-core reads and writes all gradients to clip them, copies gradients in bf16 to fp32, and casts all weights.
"""

from collections.abc import Iterator
from typing import Any

import torch

from megatron_blackmamba.runtime import patches
from megatron_blackmamba.runtime.adam import Adam

patches.install()  # before megatron-core is imported

from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402

TINY = 1e-6
"""Added to the norm by megatron-core's clipping, and here too."""


def fuse_update(optimizer: MegatronOptimizer, gradients: str = "fp32") -> None:
    """Have Adam clip and cast, if all of it runs on Triton's kernel, and read gradients in bf16 anywhere."""
    if not isinstance(optimizer, ChainedOptimizer):
        return
    parts = [part for part in optimizer.chained_optimizers if not getattr(part, "is_stub_optimizer", False)]
    if not parts or not all(isinstance(part.optimizer, Adam) for part in parts):
        return
    fused = all(part.optimizer.fused for part in parts)
    if fused or gradients == "bf16":
        _clip_in_adam(optimizer, parts)
    for part in parts:
        if isinstance(part, DistributedOptimizer):
            if fused:
                _cast_in_adam(part)
            if gradients == "bf16" and hasattr(torch.Tensor, "grad_dtype"):  # from torch 2.10 on
                _hand_over_narrow(part)


def _clip_in_adam(optimizer: ChainedOptimizer, parts: list[Any]) -> None:
    limit, norm_of = optimizer.config.clip_grad, optimizer.get_grad_norm

    def noted_norm() -> float:
        norm = norm_of()
        for part in parts:
            part.optimizer.factor = min(1.0, limit / (norm + TINY)) if limit > 0 else 1.0
        return norm

    optimizer.get_grad_norm = noted_norm
    for part in optimizer.chained_optimizers:
        part.config.clip_grad = 0.0


def _cast_in_adam(part: DistributedOptimizer) -> None:
    part.optimizer.copies = dict(_pairs(part.shard_fp32_from_float16_groups, part.shard_float16_groups))
    part._copy_main_params_to_model_params = lambda: None


def _hand_over_narrow(part: DistributedOptimizer) -> None:
    """Give Adam the gradients of bf16 weights as they are in the buffers."""
    narrow = list(_pairs(part.model_float16_groups, part.shard_fp32_from_float16_groups))
    pairs = [*narrow, *_pairs(part.model_fp32_groups, part.shard_fp32_groups)]
    for _, shard in narrow:
        shard.grad_dtype = None  # any

    def hand_over() -> None:
        for weight, shard in pairs:
            here = part._get_model_param_range_map(weight)["param"]
            shard.grad = weight.main_grad.view(-1)[here.start : here.end]

    part._copy_model_grads_to_main_grads = hand_over


def _pairs(groups: list[list[Any]], others: list[list[Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield each tensor of the groups with its counterpart."""
    for group in zip(groups, others, strict=True):
        yield from zip(*group, strict=True)
