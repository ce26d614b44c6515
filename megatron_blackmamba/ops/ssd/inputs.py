"""The arguments of one call of `ssd`, as its backends receive them."""

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """Shapes: B batch, L length, H heads, P channels of a head, G groups of heads, N state."""

    x_BLHP: Tensor
    dt_BLH: Tensor
    A_H: Tensor
    B_BLGN: Tensor
    C_BLGN: Tensor
    D_H: Tensor | None = None
    dt_bias_H: Tensor | None = None
    initial_state_BHPN: Tensor | None = None
    reset_BL: Tensor | None = None
