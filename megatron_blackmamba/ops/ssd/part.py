"""The SSD scan over one rank's part of sequences that are cut over a group (`ops/context.py`).

Shapes: B batch, L length of the part, H heads, P channels of a head, G groups of heads, N state.
"""

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_blackmamba.ops.context import Summary, scan_part
from megatron_blackmamba.ops.ssd import Inputs, backend_for, chunked


def ssd_part(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    D_H: Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    dt_bias_H: Tensor | None = None,
    reset_BL: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return y_BLHP of this rank's part; arguments as for `ssd`, which does the work with any backend.

    The state that the following ranks need comes first, without outputs; then the part is scanned with the right start.
    """

    inputs = Inputs(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, None, reset_BL)
    return scan_cut(backend_for(inputs, backend), inputs, group)


def scan_cut(backend: ModuleType, inputs: Any, group: dist.ProcessGroup) -> Tensor:
    """Return the outputs of this rank's part, scanned by `backend`; for the inputs of `ssd` or of Mamba-3."""

    def scan(part: Any, start: Tensor) -> tuple[Tensor, Tensor]:
        return backend.scan(part._replace(initial_state_BHPN=start))

    def summarise(part: Any) -> Summary:
        return decay_of_part(part), getattr(backend, "final_state", chunked.final_state)(part)

    return scan_part(scan, summarise, group, inputs)


def decay_of_part(part: Inputs) -> Tensor:
    """Return how much of its start is left at the end of a part, `[B, H, 1, 1]`."""
    steps_BLH = part.steps(torch.promote_types(part.x_BLHP.dtype, torch.float32))
    decay_BH11 = steps_BLH.sum(1).exp()[..., None, None]
    return decay_BH11 if part.reset_BL is None else decay_BH11.masked_fill(part.reset_BL.any(1)[:, None, None, None], 0)
