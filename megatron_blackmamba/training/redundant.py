"""Leave out what megatron-core's update does twice, or for nothing.

- Each optimizer of a chain gathers all weights, dense and experts'. Here they are gathered once, after all updates.
- Updated fp32 weights are copied onto themselves: the optimizer's shards are views of the model's weights.
"""

from typing import Any

from torch import Tensor

from megatron_blackmamba.runtime import patches
from megatron_blackmamba.training.accumulation import Accumulation

patches.install()  # before megatron-core is imported

from megatron.core.optimizer import MegatronOptimizer  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402


def leave_out_redundant_work(optimizer: MegatronOptimizer, reduced: Accumulation) -> None:
    """Change the optimizer of `reduced`; the weights after an update stay the same, bit for bit."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    if not all(isinstance(part, DistributedOptimizer) for part in parts):
        return
    for part in parts:
        if not part.is_stub_optimizer and _updates_in_place(part):
            part._copy_main_params_to_model_params = lambda: None
    if len(parts) > 1 and not reduced.ddp_config.overlap_param_gather:
        _gather_once(optimizer, reduced)


def _updates_in_place(part: Any) -> bool:
    """Return whether every shard that the optimizer updates is a part of the model's weight itself."""
    if any(part.model_float16_groups):
        return False
    groups = zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True)
    return all(_is_part(part, *pair) for group in groups for pair in zip(*group, strict=True))


def _is_part(part: Any, weight: Tensor, shard: Tensor) -> bool:
    here = part._get_model_param_range_map(weight)["param"]
    return shard.data_ptr() == weight.data_ptr() + here.start * weight.element_size()


def _gather_once(optimizer: Any, reduced: Accumulation) -> None:
    update, settings = optimizer.step_with_ready_grads, reduced.ddp_config

    def update_all() -> bool:
        settings.overlap_param_gather = True  # this keeps each optimizer from gathering
        try:
            successful = update()
        finally:
            settings.overlap_param_gather = False
        reduced.start_param_sync()
        return successful

    optimizer.step_with_ready_grads = update_all
