"""The update of the weights with fewer passes over memory, and fewer exchanges, than megatron-core makes.

megatron-core reads and writes all gradients to clip them, copies gradients in bf16 to fp32, and casts all weights. It
copies updated fp32 weights onto themselves, since the optimizer's shards are views of the model's weights. Each
optimizer of a chain gathers all weights, dense and experts'.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.engine.adam import Adam
from megatron_blackmamba.engine.checked import private, replace
from megatron_blackmamba.engine.parts.optimizer import Built, NonFiniteGradient, norm_over_ranks

from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

TINY = 1e-6
"""Added to the norm by megatron-core's clipping, and here too."""


def leave_out_redundant_work(built: Built) -> None:
    """Copy no weight onto itself, and gather once, after all updates; the weights stay the same, bit for bit."""
    parts = built.distributed
    if len(parts) < len(built.parts):
        return
    for part in parts:
        if not part.is_stub_optimizer and _updates_in_place(part):
            replace(part, "_copy_main_params_to_model_params", _nothing)
    if len(parts) > 1 and not built.reduced.ddp_config.overlap_param_gather:
        _gather_once(built)


def fuse_update(built: Built) -> None:
    """Have Adam clip and cast, if all of it runs on Triton's kernel, and read gradients in bf16 anywhere."""
    if not isinstance(built.optimizer, ChainedOptimizer):
        return
    parts = [part for part in built.parts if not getattr(part, "is_stub_optimizer", False)]
    if not parts or not all(isinstance(part.optimizer, Adam) for part in parts):
        return
    fused, narrow = all(part.optimizer.fused for part in parts), built.settings.gradients == "bf16"
    if fused:
        _clip_without_waiting(built.optimizer, parts)
    elif narrow:
        _clip_in_adam(built.optimizer, parts)
    distributed, any_type = [part for part in parts if isinstance(part, DistributedOptimizer)], _takes_any_type()
    for part in distributed:
        if fused:
            _cast_in_adam(part)
        if any_type and (fused or narrow):
            _hand_over(part)
    built.reduced.reads_grad = fused and any_type and len(distributed) == len(parts)


def _updates_in_place(part: Any) -> bool:
    """Return whether every shard that the optimizer updates is a part of the model's weight itself."""
    if any(part.model_float16_groups):
        return False
    return all(_is_part(part, *pair) for pair in _pairs(part.model_fp32_groups, part.shard_fp32_groups))


def _is_part(part: Any, weight: Tensor, shard: Tensor) -> bool:
    here = private(part, "_get_model_param_range_map")(weight)["param"]
    return shard.data_ptr() == weight.data_ptr() + here.start * weight.element_size()


def _gather_once(built: Built) -> None:
    update, settings = private(built.optimizer, "step_with_ready_grads"), built.reduced.ddp_config

    def update_all() -> bool:
        settings.overlap_param_gather = True  # this keeps each optimizer from gathering
        try:
            successful = update()
        finally:
            settings.overlap_param_gather = False
        built.reduced.start_param_sync()
        return successful

    replace(built.optimizer, "step_with_ready_grads", update_all)


def _clip_in_adam(optimizer: ChainedOptimizer, parts: list[Any]) -> None:
    limit, norm_of = optimizer.config.clip_grad, private(optimizer, "get_grad_norm")

    def noted_norm() -> float:
        norm = norm_of()
        for part in parts:
            part.optimizer.factor = min(1.0, limit / (norm + TINY)) if limit > 0 else 1.0
        return norm

    replace(optimizer, "get_grad_norm", noted_norm)
    for part in optimizer.chained_optimizers:
        replace(part.config, "clip_grad", 0.0)


def _clip_without_waiting(optimizer: ChainedOptimizer, parts: list[Any]) -> None:
    """Launch the update while the norm is still computed. Where that is not finite, the update changes nothing."""
    limit, update = optimizer.config.clip_grad, optimizer.step

    def noted_norm() -> Tensor:
        norm = norm_over_ranks(optimizer.chained_optimizers)
        factor = (limit / (norm + TINY)).clamp(max=1.0) if limit > 0 else torch.ones_like(norm)
        factor = factor.where(norm.isfinite(), math.nan).float()
        for part in parts:
            part.optimizer.factor = factor
        return norm

    def step() -> tuple[bool, float, Any]:
        successful, norm, zeros = update()
        if not math.isfinite(norm := float(norm)):
            for part in parts:
                part.optimizer.take_back()
            raise NonFiniteGradient(norm)
        return successful, norm, zeros

    replace(optimizer, "get_grad_norm", noted_norm)
    replace(optimizer, "step", step)
    for part in optimizer.chained_optimizers:
        replace(part.config, "clip_grad", 0.0)


def _cast_in_adam(part: DistributedOptimizer) -> None:
    part.optimizer.copies = dict(_pairs(part.shard_fp32_from_float16_groups, part.shard_float16_groups))
    replace(part, "_copy_main_params_to_model_params", _nothing)


def _takes_any_type() -> bool:
    """Return whether the gradient of a weight in fp32 may be in bf16: from torch 2.10 on."""
    return hasattr(torch.Tensor, "grad_dtype")


def _hand_over(part: DistributedOptimizer) -> None:
    """Give Adam the gradients of bf16 weights as they are in the buffers, or where autograd has put them."""
    narrow = list(_pairs(part.model_float16_groups, part.shard_fp32_from_float16_groups))
    pairs = [*narrow, *_pairs(part.model_fp32_groups, part.shard_fp32_groups)]
    ranges_of = private(part, "_get_model_param_range_map")
    for _, shard in narrow:
        shard.grad_dtype = None  # any

    def hand_over() -> None:
        for weight, shard in pairs:
            here, whole = ranges_of(weight)["param"], weight.main_grad if weight.grad is None else weight.grad
            shard.grad = whole.view(-1)[here.start : here.end]

    replace(part, "_copy_model_grads_to_main_grads", hand_over)


def _pairs(groups: list[list[Any]], others: list[list[Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield each tensor of the groups with its counterpart."""
    for group in zip(groups, others, strict=True):
        yield from zip(*group, strict=True)


def _nothing() -> None:
    """Copy nothing."""
