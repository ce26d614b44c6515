"""The arithmetic of Mamba-2 between its projections, for training, reading a prompt, and a step of decoding."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from megatron_blackmamba.layers.rows import Weight
from megatron_blackmamba.settings import ModelConfig

Map = Callable[[Tensor], Tensor]


def mixed(
    projected: Tensor,
    rows: Weight,
    model: ModelConfig,
    dt_bias_H: Tensor,
    convolve: Map,
    norms: Sequence[Map],
    scan: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    gate: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Return what out_proj reads.

    Args:
        projected: What in_proj computes.
        rows: Of in_proj, or of this rank's part of it.
        norms: Of B and C, with model.mamba_norms.
        scan: Of x by head, dt by head, and B and C by group.
        gate: The gated norm of the scan's output and z.
    """
    z, xBC, dt = rows.split(projected, "z", "x B C", "dt")
    x, *shared = rows.split(convolve(xBC), "x", "B", "C")
    if norms:
        shared = [norm(part) for norm, part in zip(norms, shared, strict=True)]
    B, C = (part.unflatten(-1, (-1, model.mamba2.state_size)) for part in shared)
    dt = _bounded(dt, dt_bias_H, model.mamba2.time_step_min)
    return gate(scan(x.unflatten(-1, (-1, model.mamba2.head_dim)), dt, B, C).flatten(-2), z)


def _bounded(dt: Tensor, bias_H: Tensor, least: float) -> Tensor:
    """Return dt such that softplus(dt + bias) is at least `least`."""
    if not least:
        return dt
    return dt.maximum((math.log(math.expm1(least)) - bias_H).to(dt.dtype))
