"""megatron-core's parallel linears, without their way around the tensor-parallel group where it is one rank."""

import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops.head_loss import head_loss

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear


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
