"""megatron-core's schedule of micro-batches: what it calls, and a single micro-batch of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from megatron_blackmamba.engine.checked import private, replace
from megatron_blackmamba.engine.parts.accumulation import Accumulation

from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler


def connect(config: Any, optimizer: MegatronOptimizer, reduced: Accumulation) -> None:
    """Have the schedule reduce gradients and scale losses, and where the wrapper overlaps this, say when."""
    how = reduced.ddp_config
    replace(config, "finalize_model_grads_func", finalize_model_grads)
    replace(config, "grad_scale_func", optimizer.scale_loss)
    if how.overlap_grad_reduce:
        replace(config, "no_sync_func", reduced.no_sync)
        if how.overlap_param_gather:
            replace(config, "param_sync_func", reduced.start_param_sync)


@contextmanager
def one_of(count: int, config: Any) -> Iterator[None]:
    """Have the schedule of one micro-batch scale losses as in a step of `count`, and leave the reduction to later."""
    scale = config.grad_scale_func
    scaled: dict[str, Any] = {"grad_scale_func": lambda loss: scale(loss) / count, "finalize_model_grads_func": None}
    with mock.patch.multiple(config, **scaled):
        yield


def loss_scale() -> Tensor | None:
    """Return the tensor that a class of megatron-core keeps for the auxiliary losses of all models."""
    return private(MoEAuxLossAutoScaler, "main_loss_backward_scale")
