"""The selective scan of Mamba-1: a linear recurrence over time whose decay and input depend on the token.

For each channel i and state n, with delta = softplus(delta + bias) where asked for,

    state[t] = exp(delta[t] * A) * state[t - 1] + delta[t] * u[t] * B[t]
    y[t]     = (sum over n of C[t] * state[t] + D * u[t]) * silu(z[t])

Every tensor is token-major, which is how the projections around the scan produce and consume them. The state is fp32
whatever the activations are, or float64 where they are.

Shapes: B batch, L length, I inner channels, N state.
"""

import torch
from torch import Tensor

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops.dtypes import require_floats
from megatron_blackmamba.ops.selective_scan.step import selective_scan_step
from megatron_blackmamba.ops.shapes import refuse_channel_first

__all__ = ["available_backends", "selective_scan", "selective_scan_step"]

BACKENDS = ("mamba_ssm", "triton", "cpu", "chunked", "reference")  # best first, each where it applies


def selective_scan(
    u_BLI: Tensor,
    delta_BLI: Tensor,
    A_IN: Tensor,
    B_BLN: Tensor,
    C_BLN: Tensor,
    D_I: Tensor | None = None,
    *,
    z_BLI: Tensor | None = None,
    delta_bias_I: Tensor | None = None,
    delta_softplus: bool = True,
    initial_state_BIN: Tensor | None = None,
    reset_BL: Tensor | None = None,
    return_final_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Return y_BLI in u's dtype, or (y_BLI, final_state_BIN in fp32).

    A_IN, D_I, delta_bias_I and the states are fp32; A_IN is negative (-exp(A_log)).

    Args:
        reset_BL: True at the first token of a document, before which the state is reset to zero.
        backend: "auto" or a key of `available_backends()`. "auto" takes a PyTorch backend for float64 u.
    """
    _check(u_BLI, delta_BLI, A_IN, B_BLN, C_BLN, D_I, z_BLI, delta_bias_I, initial_state_BIN, reset_BL)
    chosen = backends.choose(__name__, BACKENDS, backend, u_BLI, A_IN, initial_state_BIN, reset_BL)
    y_BLI, final_state_BIN = chosen.scan(
        u_BLI, delta_BLI, A_IN, B_BLN, C_BLN, D_I, z_BLI, delta_bias_I, delta_softplus, initial_state_BIN, reset_BL
    )
    return (y_BLI, final_state_BIN) if return_final_state else y_BLI


def available_backends() -> dict[str, str | None]:
    """Name -> None where this machine can use it, else the reason why not."""
    return backends.available(__name__, BACKENDS)


def _check(
    u_BLI: Tensor,
    delta_BLI: Tensor,
    A_IN: Tensor,
    B_BLN: Tensor,
    C_BLN: Tensor,
    D_I: Tensor | None,
    z_BLI: Tensor | None,
    delta_bias_I: Tensor | None,
    initial_state_BIN: Tensor | None,
    reset_BL: Tensor | None,
) -> None:
    refuse_channel_first("selective_scan", "u", u_BLI, A_IN, ", and the same for delta, z, B and C")
    B, L, I = u_BLI.shape
    N = A_IN.shape[1]
    if L == I and N != L and B_BLN.shape[1:] == (N, L):
        raise ValueError(f"selective_scan: B is channel-first, {tuple(B_BLN.shape)}. Pass B.transpose(1, 2), as for C.")
    expected = {
        "delta": (delta_BLI, (B, L, I)),
        "A": (A_IN, (I, N)),
        "B": (B_BLN, (B, L, N)),
        "C": (C_BLN, (B, L, N)),
        "D": (D_I, (I,)),
        "z": (z_BLI, (B, L, I)),
        "delta_bias": (delta_bias_I, (I,)),
        "initial_state": (initial_state_BIN, (B, I, N)),
        "reset": (reset_BL, (B, L)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"selective_scan: {name} has shape {tuple(tensor.shape)}, expected {shape} (u is {(B, L, I)})"
            )
    floats = {name: tensor for name, (tensor, _) in expected.items() if name != "reset"}
    require_floats("selective_scan", u=u_BLI, **floats)
    if reset_BL is not None and reset_BL.dtype != torch.bool:
        raise ValueError(f"selective_scan: reset is a bool tensor, not {reset_BL.dtype}")
