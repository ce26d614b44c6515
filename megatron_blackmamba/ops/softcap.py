"""The cap on output logits."""

import torch
from torch import Tensor


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(logits / cap), or without a cap the logits themselves."""
    return logits if cap is None else torch.tanh(logits / cap) * cap
