"""megatron-core's schedule of micro-batches, asked for a single one of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from megatron_blackmamba.engine.checked import private

from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler


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
