"""The arguments of one call of `ssd`, as its backends receive them.

Mamba-3 has inputs of its own (`turned.py`). The scan over chunks takes both, and asks for their terms.

Shapes: B batch, L length, H heads, P channels of a head, G groups of heads, N state. K chunks of T tokens, with R rows
of B and C each: U = T * R.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Terms(NamedTuple):
    """The terms of the recurrence in chunks, all in the type of its state.

    The recurrence, in which less defaults to 0:

    state[t] = exp(steps[t]) * state[t - 1] + x[t] * B[t]
    y[t]     = (sum over n of C[t] * state[t]) + (skip - less[t] * (sum over n of C[t] * B[t])) * input[t]

    With R rows for each token, products of C and B are matrices: the state adds up the rows of a token, and each row
    of C has an output.
    """

    x_BKUHP: Tensor
    steps_BKTH: Tensor
    B_BKGUN: Tensor
    C_BKGUN: Tensor | None = None
    input_BKUHP: Tensor | None = None
    skip_H: Tensor | None = None
    less_BKHT: Tensor | None = None
    """Needs as many groups as heads."""


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

    @property
    def rows(self) -> int:
        """Return R, the rows of B and C of a token."""
        return 1

    @property
    def state_size(self) -> int:
        """Return N."""
        return self.B_BLGN.shape[-1]

    def steps(self, compute: torch.dtype) -> Tensor:
        """Return the logarithms of the decays, `[B, L, H]`."""
        return self._dt(compute) * self.A_H.to(compute)

    def terms(self, compute: torch.dtype, outputs: bool) -> Terms:
        """Return the terms of inputs in chunks, `[B, K, T, ...]`; without outputs, those that the state needs."""
        x, dt, B = self.x_BLHP.to(compute), self._dt(compute), self.B_BLGN.to(compute).transpose(2, 3)
        steps, skip = dt * self.A_H.to(compute), None if self.D_H is None else self.D_H.to(compute)
        C = self.C_BLGN.to(compute).transpose(2, 3) if outputs else None
        return Terms(x * dt[..., None], steps, B, C, x, skip)

    def _dt(self, compute: torch.dtype) -> Tensor:
        dt_BLH = self.dt_BLH.to(compute)
        return F.softplus(dt_BLH if self.dt_bias_H is None else dt_BLH + self.dt_bias_H)
