"""megatron-core's parallel linears: without their way around a tensor-parallel group of one rank, and in FP8."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_blackmamba.config import ConfigError
from megatron_blackmamba.engine.parts.layers import multiply_by
from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.sharding import empty, replicated
from megatron_blackmamba.ops import fp8
from megatron_blackmamba.ops.head_loss import head_loss_and_log_sum

from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)


class ColumnLinear(ColumnParallelLinear):
    def forward(
        self, input_: Tensor, weight: Tensor | None = None, labels_T: Tensor | None = None, **loss: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the product; with labels, what `head_loss_and_log_sum` says of each token."""
        if labels_T is not None:
            weight = self.weight if weight is None else weight
            return head_loss_and_log_sum(input_.flatten(0, -2), weight, labels_T, **loss)
        if self.tp_group.size() > 1:
            return super().forward(input_, weight)
        return F.linear(input_, self.weight if weight is None else weight), None


class RowLinear(RowParallelLinear):
    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        return super().forward(input_) if self.tp_group.size() > 1 else (F.linear(input_, self.weight), None)


class WholeLinear(nn.Module):
    """A linear without a bias, which every tensor-parallel rank has all of and applies to its own tokens."""

    def __init__(self, inputs: int, outputs: int, config: MegatronConfig):
        super().__init__()
        self.weight = replicated(empty(outputs, inputs, dtype=config.params_dtype), config.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def column(inputs: int, outputs: int, config: MegatronConfig, tp_group: ProcessGroup) -> Any:
    """Return a mixer's first linear, without a bias: each rank has some of its rows."""
    kind, _ = linears(config.kernels.linear)
    return _unbiased(kind, inputs, outputs, config, tp_group, gather_output=False)


def row(inputs: int, outputs: int, config: MegatronConfig, tp_group: ProcessGroup) -> Any:
    """Return a mixer's linear behind split channels, without a bias: each rank has some of its columns."""
    _, kind = linears(config.kernels.linear)
    return _unbiased(kind, inputs, outputs, config, tp_group, input_is_parallel=True)


def _unbiased(kind: type, inputs: int, outputs: int, config: MegatronConfig, tp_group: ProcessGroup, **how: Any) -> Any:
    how |= {"bias": False, "skip_bias_add": False, "is_expert": False, "init_method": config.init_method}
    return kind(inputs, outputs, config=config, tp_group=tp_group, **how)


def linears(kind: str) -> tuple[type, type]:
    """Return the column- and row-parallel linears: megatron-core's, also in FP8, or Transformer Engine's."""
    if kind == "local":
        return ColumnLinear, RowLinear
    if kind == "fp8":
        if reason := fp8.why_not():
            raise ConfigError(f"kernels.linear=fp8 cannot run here: {reason}. Use kernels.linear=local.")
        return Fp8ColumnLinear, Fp8RowLinear
    from megatron.core.extensions.transformer_engine import HAVE_TE, TEColumnParallelLinear, TERowParallelLinear

    if not HAVE_TE:  # the names are there nevertheless
        raise ConfigError(
            "kernels.linear=te needs Transformer Engine, which is not installed here"
            " (pip install -e '.[cuda]'); kernels.linear=local needs nothing"
        )
    return TEColumnParallelLinear, TERowParallelLinear


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
