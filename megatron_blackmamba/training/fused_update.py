"""Clipping, Adam and the cast to bf16 in one pass over memory, where Triton's Adam updates the weights.

megatron-core reads and writes all gradients to clip them, and all weights to cast them.
"""

from typing import Any

from megatron_blackmamba.runtime.adam import Adam

from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

TINY = 1e-6
"""Added to the norm by megatron-core's clipping, and here too."""


def fuse_update(optimizer: MegatronOptimizer) -> None:
    """Have Adam clip and cast, if all of it runs on Triton's kernel; else change nothing."""
    if not isinstance(optimizer, ChainedOptimizer):
        return
    parts = [part for part in optimizer.chained_optimizers if not getattr(part, "is_stub_optimizer", False)]
    if parts and all(isinstance(part.optimizer, Adam) and part.optimizer.fused for part in parts):
        _clip_in_adam(optimizer, parts)
        for part in parts:
            if isinstance(part, DistributedOptimizer):
                _cast_in_adam(part)


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
    groups = zip(part.shard_fp32_from_float16_groups, part.shard_float16_groups, strict=True)
    part.optimizer.copies = {
        wide: narrow for wides, narrows in groups for wide, narrow in zip(wides, narrows, strict=True)
    }
    part._copy_main_params_to_model_params = lambda: None
