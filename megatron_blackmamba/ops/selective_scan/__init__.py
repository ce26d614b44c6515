"""The selective scan of Mamba-1: a linear recurrence over time whose decay and input depend on the token.

For each channel i and state n, with delta = softplus(delta + bias) where asked for,

    state[t] = exp(delta[t] * A) * state[t - 1] + delta[t] * u[t] * B[t]
    y[t]     = (sum over n of C[t] * state[t] + D * u[t]) * silu(z[t])

Every tensor is token-major, which is how the projections around the scan produce and consume them. The state is fp32
whatever the activations are, or float64 where they are.

Shapes: B batch, L length, I inner channels, N state.
"""

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops.arguments import refuse_channel_first, require_shapes
from megatron_blackmamba.ops.selective_scan.inputs import Inputs
from megatron_blackmamba.ops.selective_scan.step import selective_scan_step

if TYPE_CHECKING:
    from typing_extensions import Unpack

BACKENDS = ("cuda", "triton", "mamba_ssm", "cpp", "chunked", "reference")  # best first, each where it applies


class Options(TypedDict, total=False):
    """The keywords of `selective_scan` that do not decide the type of its result."""

    z_BLI: Tensor | None
    delta_bias_I: Tensor | None
    delta_softplus: bool
    initial_state_BIN: Tensor | None
    reset_BL: Tensor | None
    z_gradient: Callable[[Tensor], Tensor] | None
    keep_states: bool
    log_A: bool
    backend: str


@overload
def selective_scan(
    u_BLI: Tensor,
    delta_BLI: Tensor,
    A_IN: Tensor,
    B_BLN: Tensor,
    C_BLN: Tensor,
    D_I: Tensor | None = None,
    *,
    return_final_state: Literal[False] = False,
    **options: "Unpack[Options]",
) -> Tensor: ...
@overload
def selective_scan(
    u_BLI: Tensor,
    delta_BLI: Tensor,
    A_IN: Tensor,
    B_BLN: Tensor,
    C_BLN: Tensor,
    D_I: Tensor | None = None,
    *,
    return_final_state: Literal[True],
    **options: "Unpack[Options]",
) -> tuple[Tensor, Tensor]: ...
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
    z_gradient: Callable[[Tensor], Tensor] | None = None,
    keep_states: bool = True,
    log_A: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Return y_BLI in u's dtype, or (y_BLI, final_state_BIN in fp32).

    For each channel and state: `state = exp(delta * A) * state + delta * u * B`, and `y = (sum of C * state) + D * u`.
    Letters name the dimensions: B batch, L length, I channels, N state. A_IN, D_I, delta_bias_I and the states are
    fp32; A_IN is negative (-exp(A_log)).

    Args:
        z_BLI: Gate; y is multiplied by silu(z).
        delta_bias_I: Added to delta before the softplus.
        delta_softplus: Apply softplus to delta. mamba-ssm's default is False.
        initial_state_BIN: State before the first token; zero by default.
        reset_BL: True at the first token of a document, before which the state is reset to zero.
        return_final_state: Also return the state after the last token.
        z_gradient: Returns the tensor that z's gradient should be written to. Only "cuda" and "triton" use it.
        keep_states: Keep states for the backward pass, or recompute them in less memory; for "cuda" and "triton".
        log_A: A_IN is log(-A), A_log of Mamba.
        backend: "auto" or a key of `megatron_blackmamba.ops.selective_scan.available_backends()`. "auto" takes a
            PyTorch backend for float64 u.
    """
    required = (u_BLI, delta_BLI, A_IN, B_BLN, C_BLN)
    inputs = Inputs(*required, D_I, z_BLI, delta_bias_I, delta_softplus, initial_state_BIN, reset_BL)
    chosen = backend_for(inputs, backend)
    options: dict[str, Any] = {}
    if getattr(chosen, "TAKES_MEMORY_OPTIONS", False):
        options = {"z_gradient": z_gradient, "keep_states": keep_states, "log_A": log_A}
    elif log_A:
        inputs = inputs._replace(A_IN=-torch.exp(A_IN))
    y_BLI, final_state_BIN = chosen.scan(inputs, **options)
    return (y_BLI, final_state_BIN) if return_final_state else y_BLI


def available_backends() -> dict[str, str | None]:
    """Name -> None where this machine can use it, else the reason why not."""
    return backends.available(__name__, BACKENDS)


def backend_for(inputs: Inputs, backend: str) -> ModuleType:
    """Check the inputs and return the module of the backend that scans them."""
    u_BLI, A_IN, B_BLN = inputs.u_BLI, inputs.A_IN, inputs.B_BLN
    refuse_channel_first("selective_scan", "u", u_BLI, ", and the same for delta, z, B and C", A=A_IN)
    (B, L, I), N = u_BLI.shape, A_IN.shape[1]
    if L == I and N != L and B_BLN.shape[1:] == (N, L):
        raise ValueError(f"selective_scan: B is channel-first, {tuple(B_BLN.shape)}. Pass B.transpose(1, 2), as for C.")
    require_shapes("selective_scan", inputs, B=B, L=L, I=I, N=N)
    return backends.choose(__name__, BACKENDS, backend, inputs)
