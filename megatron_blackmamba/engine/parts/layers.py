"""megatron-core's layers, with what the model needs of their private parts under public names."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_blackmamba.engine.checked import replace, require

from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

require(MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize")


class AllToAll(MoEAlltoAllTokenDispatcher):
    def fetch_split_sizes(self, tokens_per_expert: Tensor) -> Any:
        """Begin to copy the split sizes to the host, where the exchange needs them."""
        return self._maybe_dtoh_and_synchronize("before_permutation_1", tokens_per_expert)


def multiply_by(product: Callable[..., Tensor], linear: Any) -> None:
    """Give a tensor-parallel linear another matrix product."""
    replace(linear, "_forward_impl", product)
