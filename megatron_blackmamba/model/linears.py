"""megatron-core's parallel linears, without their way around the tensor-parallel group where it is one rank."""

import torch.nn.functional as F
from torch import Tensor

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear


class ColumnLinear(ColumnParallelLinear):
    def forward(self, input_: Tensor, weight: Tensor | None = None) -> tuple[Tensor, None]:
        if self.tp_group.size() > 1:
            return super().forward(input_, weight)
        return F.linear(input_, self.weight if weight is None else weight), None


class RowLinear(RowParallelLinear):
    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        return super().forward(input_) if self.tp_group.size() > 1 else (F.linear(input_, self.weight), None)
