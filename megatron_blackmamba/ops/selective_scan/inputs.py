"""The arguments of one call of `selective_scan`, as its backends receive them."""

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """Shapes: B batch, L length, I inner channels, N state."""

    u_BLI: Tensor
    delta_BLI: Tensor
    A_IN: Tensor
    B_BLN: Tensor
    C_BLN: Tensor
    D_I: Tensor | None = None
    z_BLI: Tensor | None = None
    delta_bias_I: Tensor | None = None
    delta_softplus: bool = True
    initial_state_BIN: Tensor | None = None
    reset_BL: Tensor | None = None
