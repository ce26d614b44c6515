"""The order of tokens by expert: two launches on a GPU, else a sort.

Shapes: P pairs of a token and an expert, E experts.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.ops import backends


def order_of(choice_P: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pair at each place, the place of each pair, and the number of pairs of each expert, all int64.

    The pairs are in the order of their experts, and those of an expert in their own order.

    choice_P: The expert of each pair, int64. A number outside `range(experts)` gives undefined results.
    """
    choice_P = choice_P.contiguous()
    triton: Any = backends.triton_of("order", choice_P, experts)
    if triton is not None:
        found: tuple[Tensor, Tensor, Tensor] = triton.order_of(choice_P, experts)
        return found
    order_P = choice_P.argsort(stable=True)
    places_P = torch.arange(len(order_P), device=order_P.device)
    place_P = torch.empty_like(order_P).scatter_(0, order_P, places_P)
    return order_P, place_P, choice_P.new_zeros(experts).scatter_add_(0, choice_P, torch.ones_like(choice_P))
