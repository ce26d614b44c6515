"""How gradients are reduced: the settings of megatron-core's wrapper, which training runs and the plan weighs."""

from typing import TYPE_CHECKING

from megatron_blackmamba.config import RunConfig

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig


def reduction(config: RunConfig, ranks: int) -> "DistributedDataParallelConfig":
    """Return the settings for gradients that are reduced over this many ranks."""
    from megatron.core.distributed import DistributedDataParallelConfig

    in_fp32 = config.training.precision != "fp64" and config.optimizer.gradients == "fp32"
    overlap = config.training.overlap and ranks > 1
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=in_fp32,  # else in the parameters' precision
        use_distributed_optimizer=config.optimizer.distributed,
        overlap_grad_reduce=overlap,
        bucket_size=config.training.bucket_size,
        overlap_param_gather=overlap and config.optimizer.distributed,
        check_for_nan_in_grad=False,  # the optimizer's norm tells, and the step is skipped
    )
