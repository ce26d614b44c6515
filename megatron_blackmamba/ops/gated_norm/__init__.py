"""RMS norm and SiLU gate of the scan's output, group by group of channels, as Mamba-2 and Mamba-3 have it.

The backward pass keeps the inputs and one number a group.

Shapes: I channels, G groups, C = I / G channels of a group.
"""

from torch import Tensor

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops.arguments import require_floats

BACKENDS = ("triton", "reference")  # best first, each where it applies


def available_backends() -> dict[str, str | None]:
    """Name -> None where this machine can use it, else the reason why not."""
    return backends.available(__name__, BACKENDS)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight_I: Tensor,
    groups: int,
    eps: float,
    *,
    norm_first: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Return u / sqrt(mean(u²) + eps) * weight, with u = x * silu(gate), in x's dtype; a mean for each group.

    With `norm_first`, u is x, and the result is multiplied by silu(gate).
    """
    require_floats("gated_rms_norm", x=x, gate=gate, weight=weight_I)
    if x.shape != gate.shape or x.shape[-1:] != weight_I.shape or weight_I.shape[0] % groups:
        raise ValueError(
            f"gated_rms_norm: x is {tuple(x.shape)}, gate {tuple(gate.shape)}, weight {tuple(weight_I.shape)} in"
            f" {groups} groups. Give x and gate one shape, whose last size is the weight's and divisible by the groups."
        )
    chosen = backends.choose(__name__, BACKENDS, backend, x, gate, weight_I, groups)
    return chosen.gated_rms_norm(x, gate, weight_I, groups, eps, norm_first)
