"""The SSD kernels of the mamba-ssm package, where installed.

Shapes: B batch, L length, H heads, P channels of a head, G groups of heads, N state.
"""

from typing import Any

import torch
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from torch import Tensor

from megatron_blackmamba.ops.backends import UP_TO_FP32, Takes
from megatron_blackmamba.ops.ssd.chunked import CHUNK
from megatron_blackmamba.ops.ssd.inputs import Inputs

TAKES = Takes("cuda", UP_TO_FP32)


def unavailable() -> str | None:
    return None if torch.cuda.is_available() else "needs a CUDA device"


def smallest(device: str) -> None:
    """Scan two tokens of one head, forward and backward."""
    new: dict[str, Any] = {"dtype": torch.float32, "device": device}
    x_BLHP = torch.ones(1, 2, 1, 16, **new, requires_grad=True)
    x_BLGN, dt_BLH = torch.ones(1, 2, 1, 16, **new), torch.ones(1, 2, 1, **new)
    y_BLHP, _ = scan(Inputs(x_BLHP, dt_BLH, -torch.ones(1, **new), x_BLGN, x_BLGN))
    y_BLHP.sum().backward()


def unsupported(inputs: Inputs) -> str | None:
    return "the input is empty" if inputs.x_BLHP.numel() == 0 else None


def scan(inputs: Inputs) -> tuple[Tensor, Tensor]:
    dtype = inputs.x_BLHP.dtype
    # Documents are numbered from 0, the one that the initial state belongs to.
    document_BL = None if inputs.reset_BL is None else inputs.reset_BL.cumsum(dim=1, dtype=torch.int32)
    return mamba_chunk_scan_combined(
        inputs.x_BLHP,
        inputs.dt_BLH.to(dtype),
        inputs.A_H.float(),
        inputs.B_BLGN.to(dtype),
        inputs.C_BLGN.to(dtype),
        chunk_size=CHUNK,
        D=None if inputs.D_H is None else inputs.D_H.float(),
        dt_bias=None if inputs.dt_bias_H is None else inputs.dt_bias_H.float(),
        initial_states=inputs.initial_state_BHPN,
        seq_idx=document_BL,
        dt_softplus=True,
        return_final_states=True,
    )
