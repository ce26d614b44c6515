"""The convolution of the first half of rows [x | z], as a Mamba layer needs it, without copies of gradients.

x is convolved and has two readers, a projection and the scan: the kernel adds their gradients as it reads them. The
scan's kernel writes the gradient of z where the convolution then writes that of x beside it, so nobody concatenates.

Shapes: B batch, L length, I inner channels, K taps.
"""

from typing import NamedTuple

from torch import Tensor

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops.causal_conv1d import BACKENDS, Inputs, checked
from megatron_blackmamba.ops.library import empty_like_rows


class RowGradient:
    """The memory of the gradient of rows [x | z], of which two kernels write a half each."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def of_second_half(self, z_BLI: Tensor) -> Tensor:
        """Allocate rows in the memory order of z, and return the half that the gradient of z belongs in."""
        self._rows = empty_like_rows(z_BLI, channels=2 * z_BLI.shape[-1])
        return self._rows.chunk(2, dim=-1)[1]

    def take(self, x_BLI: Tensor, dz_BLI: Tensor | None) -> Tensor:
        """Return rows whose second half is dz, without a copy if it was written there. The first half is not set."""
        rows, self._rows = self._rows, None
        if rows is not None and dz_BLI is not None and _same_memory(rows.chunk(2, dim=-1)[1], dz_BLI):
            return rows
        rows = empty_like_rows(x_BLI, channels=2 * x_BLI.shape[-1])
        second = rows.chunk(2, dim=-1)[1]
        if dz_BLI is None:
            second.zero_()
        else:
            second.copy_(dz_BLI)
        return rows


class Halves(NamedTuple):
    """The convolved x, once for each of its two readers, and z."""

    x_BLI: Tensor
    x_again_BLI: Tensor
    z_BLI: Tensor
    gradient: RowGradient | None = None
    """For the scan, which writes z's gradient to it."""


def convolve_first_half(
    xz_BLJ: Tensor,
    weight_IK: Tensor,
    bias_I: Tensor | None = None,
    *,
    reset_BL: Tensor | None = None,
    backend: str = "auto",
) -> Halves:
    """Convolve the first half of each row, then apply SiLU, as `causal_conv1d` does."""
    x_BLI, z_BLI = xz_BLJ.chunk(2, dim=-1)
    inputs = checked(Inputs(x_BLI, weight_IK, bias_I, "silu", None, reset_BL))
    chosen = backends.choose(__package__, BACKENDS, backend, inputs)
    if getattr(chosen, "TAKES_ROWS", False):
        gradient = RowGradient()
        y_BLI, again_BLI, z_BLI = chosen.convolve_rows(xz_BLJ, inputs, gradient)
        return Halves(y_BLI, again_BLI, z_BLI, gradient)
    y_BLI = chosen.convolve(inputs)
    return Halves(y_BLI, y_BLI, z_BLI)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    same_storage = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same_storage and (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())
