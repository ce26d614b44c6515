"""Activations, with a gate or without, as PyTorch's operations, any dtype and device.

Shapes: T tokens, F hidden units, G = 2F gate and up, gate first.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def relu2(x: Tensor) -> Tensor:
    """Return the square of ReLU."""
    return F.relu(x).square()


# SwiGLU, and GeGLU with the exact (erf) GELU.
GATED: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu}
ACTIVATIONS = {**GATED, "relu2": relu2}


def activated(x: Tensor, activation: str, gate: bool = True) -> Tensor:
    """Return the activation of x; with a gate, of its first half, times the second."""
    if not gate:
        return ACTIVATIONS[activation](x)
    gate_half, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate_half) * up


def gated(gate_up_TG: Tensor, activation: str, weights_T: Tensor | None) -> Tensor:
    y_TF = activated(gate_up_TG, activation)
    return y_TF if weights_T is None else (y_TF * weights_T[:, None]).to(y_TF.dtype)
