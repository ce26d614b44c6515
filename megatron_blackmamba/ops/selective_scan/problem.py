"""Tensors that the GPU kernels of the selective scan read and write, gathered once for all launches of a call.

Shapes: B batch, L length, I inner channels, N state, G chunks.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_blackmamba.ops.library import with_channels_contiguous
from megatron_blackmamba.ops.selective_scan.inputs import Inputs


@dataclass
class Problem:
    """The inputs as the kernels want them, and the arguments every launch shares."""

    u: Tensor
    delta: Tensor
    z: Tensor | None
    A_IN: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    bias: Tensor | None
    reset: Tensor | None
    softplus: bool
    log_A: bool = False
    """A_IN is log(-A)."""

    @staticmethod
    def of(inputs: Inputs, log_A: bool = False) -> "Problem":
        D_I, z_BLI, delta_bias_I, softplus, _, reset_BL = inputs[5:]
        return Problem(
            u=with_channels_contiguous(inputs.u_BLI),
            delta=with_channels_contiguous(inputs.delta_BLI),
            z=None if z_BLI is None else with_channels_contiguous(z_BLI),
            A_IN=inputs.A_IN.float().contiguous(),
            B=inputs.B_BLN,
            C=inputs.C_BLN,
            D=None if D_I is None else D_I.float(),
            bias=None if delta_bias_I is None else delta_bias_I.float(),
            reset=None if reset_BL is None else reset_BL.contiguous().view(torch.uint8),
            softplus=softplus,
            log_A=log_A,
        )

    def part(self, some: slice) -> "Problem":
        """Return the arguments for some sequences of the batch."""
        names = ("u", "delta", "z", "B", "C", "reset")
        return replace(self, **{name: _cut(getattr(self, name), some) for name in names})

    @cached_property
    def A_NI(self) -> Tensor:
        A_NI = self.A_IN.t().contiguous()
        return A_NI.exp().neg_() if self.log_A else A_NI

    @cached_property
    def BC(self) -> Tensor:
        """B and C as [B, L, 2N] in fp32: what all channels share is read often, so it is made easy to read."""
        return torch.cat((self.B, self.C), dim=-1).float()

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        B, L, I = self.u.shape
        return B, L, I, self.A_IN.shape[1]

    def switches(self, block: int, steps: int, *names: str) -> dict[str, Any]:
        _, L, I, _ = self.sizes
        every = {
            "HAS_Z": self.z is not None,
            "HAS_D": self.D is not None,
            "HAS_BIAS": self.bias is not None,
            "HAS_RESET": self.reset is not None,
            "SOFTPLUS": self.softplus,
            "EVEN": I % block == 0 and L % steps == 0,
        }
        return {name: value for name, value in every.items() if not names or name in names}

    def or_u(self, tensor: Tensor | None) -> Tensor:
        """Return a valid pointer for an absent input, which is never read."""
        return self.u if tensor is None else tensor


class Kept(NamedTuple):
    """The gradient of y, and what the forward pass saved: states, and y before the gate."""

    dy: Tensor
    states: Tensor
    raw_y: Tensor | None

    def part(self, cut: slice) -> "Kept":
        return Kept(*(_cut(x, cut) for x in self))


@dataclass
class Gradients:
    """The gradients of the inputs. A, D and the bias have one sum per sequence and chunk."""

    du: Tensor
    ddelta: Tensor
    dz: Tensor | None
    dBC: Tensor
    dstart_BNI: Tensor
    dA_BGNI: Tensor
    dD_BGI: Tensor
    dbias_BGI: Tensor

    def part(self, cut: slice) -> "Gradients":
        """Some sequences of the batch."""
        return Gradients(**{name: _cut(x, cut) for name, x in vars(self).items()})


def _cut(x: Tensor | None, sequences: slice) -> Any:
    return None if x is None else x[sequences]
