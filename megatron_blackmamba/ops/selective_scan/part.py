"""The selective scan over one rank's part of sequences that are cut over a group (`ops/context.py`).

Shapes: B batch, L length of the part, I inner channels, N state.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops.context import Chain, Summary, scan_part
from megatron_blackmamba.ops.selective_scan import Inputs, backend_for

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
    keep_states: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Return y_BLI of this rank's part; arguments as for `selective_scan`.

    A backend that takes a `chain` sees the other ranks between its own phases. With any other one, the part is scanned
    twice (`scan_part`).
    """
    inputs = Inputs(u_BLI, delta_BLI, A_IN, B_BLN, C_BLN, D_I, z_BLI, delta_bias_I, delta_softplus, None, reset_BL)
    compute = torch.promote_types(u_BLI.dtype, torch.float32)
    nothing = torch.zeros(len(u_BLI), *A_IN.shape, dtype=compute, device=u_BLI.device)
    chosen = backend_for(inputs._replace(initial_state_BIN=nothing), backend)
    if getattr(chosen, "TAKES_CHAIN", False):
        memory = {"keep_states": keep_states} if getattr(chosen, "TAKES_MEMORY_OPTIONS", False) else {}
        return chosen.scan(inputs, chain=Chain(group), **memory)[0]

    def scan(part: Inputs, start: Tensor) -> tuple[Tensor, Tensor]:
        return chosen.scan(part._replace(initial_state_BIN=start))

    def summarise(part: Inputs) -> Summary:
        return decay_of_part(part), scan(part._replace(D_I=None, z_BLI=None), nothing)[1]

    return scan_part(scan, summarise, group, inputs)


def decay_of_part(part: Inputs) -> Tensor:
    """Return how much of its start is left at the end of a part, `[B, I, N]`: exp(A · sum of delta)."""
    delta_BLI, bias_I = part.delta_BLI, part.delta_bias_I
    compute = torch.promote_types(part.u_BLI.dtype, torch.float32)
    duration_BI = torch.zeros(len(delta_BLI), len(part.A_IN), dtype=compute, device=delta_BLI.device)
    for some_BTI in delta_BLI.split(TOKENS, dim=1):
        some_BTI = some_BTI.to(compute)
        if bias_I is not None:
            some_BTI = some_BTI + bias_I
        duration_BI += (F.softplus(some_BTI) if part.delta_softplus else some_BTI).sum(1)
    decay_BIN = torch.exp(duration_BI[:, :, None] * part.A_IN)
    return decay_BIN if part.reset_BL is None else decay_BIN.masked_fill(part.reset_BL.any(1)[:, None, None], 0.0)
