"""The arguments of one call of `ssd`, as its backends receive them.

Mamba-3 has inputs of its own (`turned.py`). The scan over chunks takes both: it asks for the terms of the recurrence

    state[t] = exp(steps[t]) * state[t - 1] + x[t] * B[t]
    y[t]     = (sum over n of C[t] * state[t]) + skip[t] * input[t]

Shapes: B batch, L length, H heads, P channels of a head, G groups of heads, N state.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Inputs(NamedTuple):
    """Fields whose shape begins with BL have an entry for each token."""

    x_BLHP: Tensor
    dt_BLH: Tensor
    A_H: Tensor
    B_BLGN: Tensor
    C_BLGN: Tensor
    D_H: Tensor | None = None
    dt_bias_H: Tensor | None = None
    initial_state_BHPN: Tensor | None = None
    reset_BL: Tensor | None = None

    def steps(self, compute: torch.dtype) -> Tensor:
        """Return the logarithms of the decays, `[B, L, H]`."""
        return self._dt(compute) * self.A_H.to(compute)

    def written(self, compute: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return what each token adds to the state, as x `[B, L, H, P]` and B `[B, L, G, N]`."""
        return self.x_BLHP.to(compute) * self._dt(compute)[..., None], self.B_BLGN.to(compute)

    def read(self, compute: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return C `[B, L, G, N]`, and skip `[H]` or `[B, L, H]`."""
        return self.C_BLGN.to(compute), None if self.D_H is None else self.D_H.to(compute)

    def _dt(self, compute: torch.dtype) -> Tensor:
        dt_BLH = self.dt_BLH.to(compute)
        return F.softplus(dt_BLH if self.dt_bias_H is None else dt_BLH + self.dt_bias_H)
