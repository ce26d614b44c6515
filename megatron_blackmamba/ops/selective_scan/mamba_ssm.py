"""The selective scan of the mamba-ssm package, where installed: channel-major inside, so both ends are transposed.

Shapes: B batch, L length, I inner channels, N state.
"""

from typing import Any

import torch
from mamba_ssm.ops import selective_scan_interface
from torch import Tensor

from megatron_blackmamba.ops.backends import UP_TO_FP32, Takes
from megatron_blackmamba.ops.selective_scan.inputs import Inputs

TAKES = Takes("cuda", UP_TO_FP32)


def unavailable() -> str | None:
    if getattr(selective_scan_interface, "selective_scan_cuda", None) is None:  # optional from its main branch on
        return "mamba-ssm was built without selective_scan_cuda"
    return None if torch.cuda.is_available() else "needs a CUDA device"


def smallest(device: str) -> None:
    """Scan two tokens, forward and backward."""
    new: dict[str, Any] = {"dtype": torch.float32, "device": device}
    u_BLI = torch.ones(1, 2, 8, **new, requires_grad=True)
    x_BLN, A_IN = torch.ones(1, 2, 16, **new), -torch.ones(8, 16, **new)
    y_BLI, _ = scan(Inputs(u_BLI, torch.ones_like(u_BLI), A_IN, x_BLN, x_BLN))
    y_BLI.sum().backward()


def unsupported(inputs: Inputs) -> str | None:
    if inputs.initial_state_BIN is not None or inputs.reset_BL is not None:
        return "takes no initial state and no resets"
    return "the input is empty" if inputs.u_BLI.numel() == 0 else None


def scan(inputs: Inputs) -> tuple[Tensor, Tensor]:
    def channel_major(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(inputs.u_BLI.dtype).transpose(1, 2)

    def fp32(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.float()

    y_BIL, final_state_BIN = selective_scan_interface.selective_scan_fn(
        channel_major(inputs.u_BLI),
        channel_major(inputs.delta_BLI),
        inputs.A_IN.float(),
        channel_major(inputs.B_BLN),
        channel_major(inputs.C_BLN),
        fp32(inputs.D_I),
        z=channel_major(inputs.z_BLI),
        delta_bias=fp32(inputs.delta_bias_I),
        delta_softplus=inputs.delta_softplus,
        return_last_state=True,
    )
    if final_state_BIN.requires_grad:
        final_state_BIN.register_hook(_refuse)
    return y_BIL.transpose(1, 2), final_state_BIN


def _refuse(gradient: Tensor | None) -> None:
    if gradient is None:  # only y has one
        return
    raise RuntimeError('mamba-ssm gives the final state no gradient; use selective_scan(..., backend="triton")')
