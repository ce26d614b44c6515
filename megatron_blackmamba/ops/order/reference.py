"""The order of tokens by expert as a sort.

Shapes: P pairs of a token and an expert.
"""

import torch
from torch import Tensor


def order_of(choice_P: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    order_P = choice_P.argsort(stable=True)
    places_P = torch.arange(len(order_P), device=order_P.device)
    place_P = torch.empty_like(order_P).scatter_(0, order_P, places_P)
    return order_P, place_P, choice_P.new_zeros(experts).scatter_add_(0, choice_P, torch.ones_like(choice_P))
