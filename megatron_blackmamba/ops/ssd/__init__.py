"""The state-space dual (SSD) scan of Mamba-2: a linear recurrence whose decay is one number a head and token.

For each head h, channel p and state n, with dt = softplus(dt + bias) and the B and C of the head's group,

    state[t] = exp(dt[t] * A) * state[t - 1] + dt[t] * x[t] * B[t]
    y[t]     = (sum over n of C[t] * state[t]) + D * x[t]

As all channels of a head decay alike, a chunk of tokens is a few matrix products. The state is fp32 whatever the
activations are, or float64 where they are.

Shapes: B batch, L length, H heads, P channels of a head, G groups of heads, N state.
"""

from types import ModuleType
from typing import TYPE_CHECKING, Literal, TypedDict, overload

from torch import Tensor

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops.arguments import require_dimensions, require_shapes
from megatron_blackmamba.ops.ssd.inputs import Inputs
from megatron_blackmamba.ops.ssd.step import ssd_step

if TYPE_CHECKING:
    from typing_extensions import Unpack

BACKENDS = ("triton", "mamba_ssm", "chunked", "reference")  # best first, each where it applies


class Options(TypedDict, total=False):
    """The keywords of `ssd` that do not decide the type of its result."""

    dt_bias_H: Tensor | None
    initial_state_BHPN: Tensor | None
    reset_BL: Tensor | None
    backend: str


@overload
def ssd(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    D_H: Tensor | None = None,
    *,
    return_final_state: Literal[False] = False,
    **options: "Unpack[Options]",
) -> Tensor: ...
@overload
def ssd(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    D_H: Tensor | None = None,
    *,
    return_final_state: Literal[True],
    **options: "Unpack[Options]",
) -> tuple[Tensor, Tensor]: ...
def ssd(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    D_H: Tensor | None = None,
    *,
    dt_bias_H: Tensor | None = None,
    initial_state_BHPN: Tensor | None = None,
    reset_BL: Tensor | None = None,
    return_final_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Return y_BLHP in x's dtype, or (y_BLHP, final_state_BHPN in fp32).

    With dt after softplus: `state = exp(dt * A) * state + dt * x * B`, and `y = (sum of C * state) + D * x`. Letters
    name the dimensions: B batch, L length, H heads, P channels of a head, G groups of heads, N state. A_H, D_H,
    dt_bias_H and the states are fp32; A_H is negative (-exp(A_log)).

    Args:
        dt_bias_H: Added to dt before the softplus, which is always applied.
        initial_state_BHPN: State before the first token; zero by default.
        reset_BL: True at the first token of a document, before which the state is reset to zero.
        return_final_state: Also return the state after the last token.
        backend: "auto" or a key of `megatron_blackmamba.ops.ssd.available_backends()`. "auto" takes a
            PyTorch backend for float64 x.
    """
    inputs = Inputs(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, initial_state_BHPN, reset_BL)
    y_BLHP, final_state_BHPN = backend_for(inputs, backend).scan(inputs)
    return (y_BLHP, final_state_BHPN) if return_final_state else y_BLHP


def available_backends() -> dict[str, str | None]:
    """Name -> None where this machine can use it, else the reason why not."""
    return backends.available(__name__, BACKENDS)


def backend_for(inputs: Inputs, backend: str) -> ModuleType:
    """Check the inputs and return the module of the backend that scans them."""
    for name, tensor in (("x", inputs.x_BLHP), ("B", inputs.B_BLGN)):
        require_dimensions("ssd", name, tensor, 4)
    (B, L, H, P), (G, N) = inputs.x_BLHP.shape, inputs.B_BLGN.shape[-2:]
    require_shapes("ssd", inputs, B=B, L=L, H=H, P=P, G=G, N=N)
    if H % G:
        raise ValueError(f"ssd: {H} heads in {G} groups: x is {(B, L, H, P)}, B is {(B, L, G, N)}. Make H divisible.")
    return backends.choose(__name__, BACKENDS, backend, inputs)
