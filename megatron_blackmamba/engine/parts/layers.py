"""megatron-core's layers, with what the model needs of their private parts under public names."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_blackmamba.engine.checked import private, replace

from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


class AllToAll(MoEAlltoAllTokenDispatcher):
    def fetch_split_sizes(self, tokens_per_expert: Tensor) -> Any:
        """Begin to copy the split sizes to the host, where the exchange needs them."""
        return private(self, "_maybe_dtoh_and_synchronize")("before_permutation_1", tokens_per_expert)


def multiply_by(product: Callable[..., Tensor], linear: Any) -> None:
    """Give a tensor-parallel linear another matrix product."""
    replace(linear, "_forward_impl", product)


def leave_whole(linear: Any) -> None:
    """Have a row-parallel linear leave its sum over the ranks whole, where it would scatter it along the sequence."""
    replace(linear, "sequence_parallel", False)
