"""megatron-core's parallel linears: without their way around a tensor-parallel group of one rank, and in FP8."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_blackmamba.engine.parts.layers import multiply_by
from megatron_blackmamba.ops import fp8
from megatron_blackmamba.ops.head_loss import head_loss

from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)


class ColumnLinear(ColumnParallelLinear):
    def forward(
        self, input_: Tensor, weight: Tensor | None = None, labels_T: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Return the product; with labels, the loss of each token over the whole vocabulary."""
        if labels_T is not None:
            return head_loss(input_.flatten(0, -2), self.weight if weight is None else weight, labels_T), None
        if self.tp_group.size() > 1:
            return super().forward(input_, weight)
        return F.linear(input_, self.weight if weight is None else weight), None


class RowLinear(RowParallelLinear):
    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        return super().forward(input_) if self.tp_group.size() > 1 else (F.linear(input_, self.weight), None)


class Fp8ColumnLinear(ColumnParallelLinear):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        multiply_by(product, self)


class Fp8RowLinear(RowParallelLinear):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        multiply_by(product, self)


def product(
    input: Tensor,
    weight: Tensor,
    *,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: ProcessGroup | None,
    **unused: object,
) -> Tensor:
    """Multiply in FP8 where the sides of the weight allow it; megatron-core's linears call this."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    return fp8.fp8_linear(input, weight) if fp8.fits(weight) else F.linear(input, weight)
