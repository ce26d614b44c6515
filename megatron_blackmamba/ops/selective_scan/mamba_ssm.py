"""The selective scan of the mamba-ssm package, where installed: channel-major inside, so both ends are transposed.

Shapes: B batch, L length, I inner channels, N state.
"""

import torch
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from torch import Tensor


def unavailable() -> str | None:
    return None if torch.cuda.is_available() else "needs a CUDA device"


def unsupported(u_BLI: Tensor, A_IN: Tensor, initial_state_BIN: Tensor | None, reset_BL: Tensor | None) -> str | None:
    if not u_BLI.is_cuda:
        return "the tensors are not on a CUDA device"
    if initial_state_BIN is not None or reset_BL is not None:
        return "takes no initial state and no resets"
    if u_BLI.dtype == torch.float64:
        return "computes in float32, the input is float64"
    return "the input is empty" if u_BLI.numel() == 0 else None


def scan(
    u_BLI: Tensor,
    delta_BLI: Tensor,
    A_IN: Tensor,
    B_BLN: Tensor,
    C_BLN: Tensor,
    D_I: Tensor | None,
    z_BLI: Tensor | None,
    delta_bias_I: Tensor | None,
    delta_softplus: bool,
    initial_state_BIN: Tensor | None,
    reset_BL: Tensor | None,
) -> tuple[Tensor, Tensor]:
    def channel_major(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(u_BLI.dtype).transpose(1, 2)

    def fp32(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.float()

    y_BIL, final_state_BIN = selective_scan_fn(
        channel_major(u_BLI),
        channel_major(delta_BLI),
        A_IN.float(),
        channel_major(B_BLN),
        channel_major(C_BLN),
        fp32(D_I),
        z=channel_major(z_BLI),
        delta_bias=fp32(delta_bias_I),
        delta_softplus=delta_softplus,
        return_last_state=True,
    )
    if final_state_BIN.requires_grad:
        final_state_BIN.register_hook(_refuse)
    return y_BIL.transpose(1, 2), final_state_BIN


def _refuse(gradient: Tensor) -> None:
    raise RuntimeError('mamba-ssm gives the final state no gradient; use selective_scan(..., backend="triton")')
