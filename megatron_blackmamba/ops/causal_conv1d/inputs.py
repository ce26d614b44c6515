"""The arguments of one call of `causal_conv1d`, as its backends receive them."""

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """Shapes: B batch, L length, I inner channels, K taps, W = K - 1 the window."""

    x_BLI: Tensor
    weight_IK: Tensor
    bias_I: Tensor | None = None
    activation: str | None = "silu"
    initial_window_BWI: Tensor | None = None
    reset_BL: Tensor | None = None
