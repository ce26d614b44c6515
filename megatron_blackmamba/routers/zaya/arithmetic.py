"""The logits of ZAYA1's router, in training and decoding.

Shapes: D model, E experts, R numbers that pass from layer to layer.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor


def logits_and_state(
    down_R: Tensor, carried_R: Tensor | None, weights: Mapping[str, Tensor], eps: float
) -> tuple[Tensor, Tensor]:
    """Return the logits, and the numbers for the next layer of experts.

    Args:
        down_R: The hidden state's product with `down`, plus `down_bias`.
        carried_R: The numbers of the layer of experts before; None: it is the first.
        weights: By their names in the router, in the same precision.
    """
    state_R = down_R if carried_R is None else down_R + carried_R * weights["carry"]
    hidden_R = F.rms_norm(state_R, weights["norm"].shape, weights["norm"], eps)
    hidden_R = F.gelu(F.linear(hidden_R, weights["first"], weights["first_bias"]))
    hidden_R = F.gelu(F.linear(hidden_R, weights["second"], weights["second_bias"]))
    return F.linear(hidden_R, weights["weight"], weights.get("bias")), state_R
