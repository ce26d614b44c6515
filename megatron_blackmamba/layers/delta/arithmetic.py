"""The arithmetic of the delta rule between its projections, for training, reading a prompt, and a step of decoding.

Shapes: H heads, K key channels of a head, V value channels, D decays of a head: 1 or K.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.layers.delta.kind import sizes
from megatron_blackmamba.layers.rows import Weight
from megatron_blackmamba.settings import ModelConfig

Map = Callable[[Tensor], Tensor]
SMALLEST = 1e-6
"""Added to the square of a key's length, as in the published models."""


def mixed(
    projected: Tensor,
    rows: Weight,
    model: ModelConfig,
    dt_bias: Tensor,
    A_log_H: Tensor,
    convolve: Map,
    decays: Map,
    scan: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor],
    norm: Map,
) -> Tensor:
    """Return what out_proj reads.

    Args:
        projected: What in_proj computes.
        rows: Of in_proj, or of this rank's part of it.
        decays: Returns the decays before their bias, given what in_proj says of them.
        scan: Of q, k, erase, written and log_decay.
        norm: Of a head's output.
    """
    z, qkv, *gates, decay = rows.split(projected, "z", "q k v", *list(rows.rows)[4:])
    q, k, v = rows.split(convolve(qkv), "q", "k", "v")
    K, V = sizes(model)[2:]
    compute = torch.promote_types(q.dtype, torch.float32)
    v = v.unflatten(-1, (-1, V)).to(compute)
    H = v.shape[-2]
    q, k = (_unit(x.to(compute).unflatten(-1, (-1, K))) for x in (q, k))
    q, k = (x.repeat_interleave(H // x.shape[-2], dim=-2) for x in (q * K**-0.5, k))
    erase, *write = (gate.to(compute).unflatten(-1, (H, -1)).sigmoid() for gate in gates)
    write = write[0] if write else erase
    if model.delta.negative_eigenvalues:
        write, erase = write if model.delta.variant == "gdn2" else 2 * write, 2 * erase
    dt = F.softplus(decays(decay).to(compute) + dt_bias.to(compute)).unflatten(-1, (H, -1))
    log_decay = -A_log_H.to(compute).exp()[:, None] * dt
    y = norm(scan(q, k, erase * k, write * v, log_decay))
    z = z.to(compute)
    return (y.flatten(-2) * (z.sigmoid() if model.delta.variant == "kda" else F.silu(z))).to(projected.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + SMALLEST)
