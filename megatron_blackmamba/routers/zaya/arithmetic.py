"""The logits of ZAYA1's router, in training and decoding.

Shapes: D model, E experts, R numbers that pass from layer to layer.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor


def logits_and_state(
    down_R: Tensor, carried_R: Tensor | None, weights: Mapping[str, Tensor], eps: float
) -> tuple[Tensor, Tensor]:
    """Return the logits without their bias, and the numbers for the next layer of experts.

    Args:
        down_R: The hidden state's product with `down`, plus `down_bias`.
        carried_R: The numbers of the layer of experts before; None: it is the first.
    """
    own = {name: weight.to(down_R.dtype) for name, weight in weights.items()}
    state_R = down_R if carried_R is None else down_R + carried_R * own["carry"]
    hidden_R = F.rms_norm(state_R, own["norm"].shape, own["norm"], eps)
    hidden_R = F.gelu(F.linear(hidden_R, own["first"], own["first_bias"]))
    hidden_R = F.gelu(F.linear(hidden_R, own["second"], own["second_bias"]))
    return F.linear(hidden_R, own["weight"]), state_R
