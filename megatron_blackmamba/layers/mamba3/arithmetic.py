"""The arithmetic of Mamba-3 between its projections, for training, reading a prompt, and a step of decoding."""

from collections.abc import Callable, Sequence

from torch import Tensor

from megatron_blackmamba.layers.rows import Weight
from megatron_blackmamba.ops.mamba3 import Rates, gated
from megatron_blackmamba.settings import ModelConfig

Map = Callable[[Tensor], Tensor]


def mixed(
    projected: Tensor,
    rows: Weight,
    model: ModelConfig,
    dt_bias_H: Tensor,
    norms: Sequence[Map],
    scan: Callable[[Tensor, Rates, Tensor, Tensor], Tensor],
    normed: Callable[..., Tensor] | None,
    factors: tuple[Tensor | None, Tensor | None],
    gathered: Map = lambda angle: angle,
) -> Tensor:
    """Return what out_proj reads.

    Args:
        projected: What in_proj computes.
        rows: Of in_proj, or of this rank's part of it.
        norms: Of B and C.
        scan: Of x by head, the rates, and B and C by rank and group.
        normed: The norm of the scan's output, with a second argument times the SiLU of that, with
            model.mamba3.output_norm.
        factors: Of gates and outputs, with model.mamba3.rank above 1.
        gathered: Returns the angles of all ranks.
    """
    z, x, *shared, dt, A, trap, angle = rows.split(projected)
    by_rank = (model.mamba3.rank, -1, model.mamba3.state_size)
    B, C = (norm(part.unflatten(-1, by_rank)) for norm, part in zip(norms, shared, strict=True))
    rates = Rates.of(dt, A, trap, gathered(angle), dt_bias_H, model.mamba3.a_floor)
    y = scan(x.unflatten(-1, (-1, model.mamba3.head_dim)), rates, B, C)
    if normed is not None and factors[0] is None:
        return normed(y.flatten(-2), z)
    if normed is not None:
        y = normed(y.flatten(-2)).unflatten(-1, y.shape[-2:])
    return gated(y, z, *factors)
