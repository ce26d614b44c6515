"""The selective scan over one rank's part of sequences that are cut over a group (`ops/context.py`).

Shapes: B batch, L length of the part, I inner channels, N state.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops.context import Chain, Summary, scan_part
from megatron_blackmamba.ops.selective_scan import BACKENDS, selective_scan

PACKAGE = "megatron_blackmamba.ops.selective_scan"
TOKENS = 1024  # whose time steps are in memory at once, in full precision


def selective_scan_part(
    u_BLI: Tensor,
    delta_BLI: Tensor,
    A_IN: Tensor,
    B_BLN: Tensor,
    C_BLN: Tensor,
    D_I: Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    z_BLI: Tensor | None = None,
    delta_bias_I: Tensor | None = None,
    delta_softplus: bool = True,
    reset_BL: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return y_BLI of this rank's part; arguments as for `selective_scan`.

    A backend that takes a `chain` sees the other ranks between its own phases. With any other one, the part is scanned
    twice (`scan_part`).
    """
    compute = torch.promote_types(u_BLI.dtype, torch.float32)
    nothing = torch.zeros(len(u_BLI), *A_IN.shape, dtype=compute, device=u_BLI.device)
    chosen = backends.choose(PACKAGE, BACKENDS, backend, u_BLI, A_IN, nothing, reset_BL)
    if getattr(chosen, "TAKES_CHAIN", False):
        inputs = (u_BLI, delta_BLI, A_IN, B_BLN, C_BLN, D_I, z_BLI, delta_bias_I, delta_softplus, None, reset_BL)
        return chosen.scan(*inputs, chain=Chain(group))[0]

    def scan(u, delta, A, B, C, D, z, bias, reset, start) -> tuple[Tensor, Tensor]:
        y, end = selective_scan(
            *(u, delta, A, B, C, D),
            z_BLI=z,
            delta_bias_I=bias,
            delta_softplus=delta_softplus,
            initial_state_BIN=start,
            reset_BL=reset,
            return_final_state=True,
            backend=backend,
        )
        return y, end

    def summarise(u, delta, A, B, C, D, z, bias, reset) -> Summary:
        _, end = scan(u, delta, A, B, C, None, None, bias, reset, nothing)
        return decay_of_part(delta, A, bias, delta_softplus, reset, compute), end

    return scan_part(
        *(scan, summarise, group),
        *(u_BLI, delta_BLI, A_IN, B_BLN, C_BLN, D_I, z_BLI, delta_bias_I, reset_BL),
    )


def decay_of_part(
    delta_BLI: Tensor,
    A_IN: Tensor,
    delta_bias_I: Tensor | None,
    delta_softplus: bool,
    reset_BL: Tensor | None,
    compute: torch.dtype,
) -> Tensor:
    """Return how much of its start is left at the end of a part, `[B, I, N]`: exp(A · sum of delta)."""
    duration_BI = torch.zeros(len(delta_BLI), len(A_IN), dtype=compute, device=A_IN.device)
    for some_BTI in delta_BLI.split(TOKENS, dim=1):
        some_BTI = some_BTI.to(compute)
        if delta_bias_I is not None:
            some_BTI = some_BTI + delta_bias_I
        duration_BI += (F.softplus(some_BTI) if delta_softplus else some_BTI).sum(1)
    decay_BIN = torch.exp(duration_BI[:, :, None] * A_IN)
    return decay_BIN if reset_BL is None else decay_BIN.masked_fill(reset_BL.any(1)[:, None, None], 0.0)
