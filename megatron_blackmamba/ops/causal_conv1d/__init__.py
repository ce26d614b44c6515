"""Causal depthwise convolution over time: each channel sees its own last K inputs.

    y[t] = activation(bias + sum over j of weight[K - 1 - j] * x[t - j]),   j = 0 .. K - 1

The inputs before the first token come from `initial_window`, the last K - 1 of the part before, or are zero. At a reset
(the first token of a new document) the inputs before it count as zero.

Shapes: B batch, L length, I inner channels, K taps, W = K - 1 the window.
"""

from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
from torch import Tensor

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops.arguments import refuse_channel_first, require_shapes
from megatron_blackmamba.ops.causal_conv1d.inputs import Inputs
from megatron_blackmamba.ops.causal_conv1d.step import causal_conv1d_step

if TYPE_CHECKING:
    from typing_extensions import Unpack

BACKENDS = ("triton", "cpp", "reference")  # best first, each where it applies


class Options(TypedDict, total=False):
    """The keywords of `causal_conv1d` that do not decide the type of its result."""

    activation: str | None
    initial_window: Tensor | None
    reset_BL: Tensor | None
    backend: str


@overload
def causal_conv1d(
    x_BLI: Tensor,
    weight_IK: Tensor,
    bias_I: Tensor | None = None,
    *,
    return_final_window: Literal[False] = False,
    **options: "Unpack[Options]",
) -> Tensor: ...
@overload
def causal_conv1d(
    x_BLI: Tensor,
    weight_IK: Tensor,
    bias_I: Tensor | None = None,
    *,
    return_final_window: Literal[True],
    **options: "Unpack[Options]",
) -> tuple[Tensor, Tensor]: ...
def causal_conv1d(
    x_BLI: Tensor,
    weight_IK: Tensor,
    bias_I: Tensor | None = None,
    *,
    activation: str | None = "silu",
    initial_window: Tensor | None = None,
    reset_BL: Tensor | None = None,
    return_final_window: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Return y_BLI in x's dtype, or (y_BLI, final_window_BWI): what a next call needs to continue where this one ends.

    `y[t] = activation(bias + sum of weight[K - 1 - j] * x[t - j])` for j from 0 to K - 1. Letters name the dimensions:
    B batch, L length, I channels, K taps, W = K - 1.

    Args:
        activation: "silu" or None. causal-conv1d's default is None.
        initial_window: The K - 1 inputs before the first token, `[B, W, I]`; zero by default.
        reset_BL: True at the first token of a document; the inputs before it count as zero.
        return_final_window: Also return the last K - 1 inputs, `[B, W, I]`.
        backend: "auto" or a key of `megatron_blackmamba.ops.causal_conv1d.available_backends()`.
    """
    inputs = checked(Inputs(x_BLI, weight_IK, bias_I, activation, initial_window, reset_BL))
    y_BLI = backends.choose(__name__, BACKENDS, backend, inputs).convolve(inputs)
    if not return_final_window:
        return y_BLI
    return y_BLI, final_window(x_BLI, weight_IK.shape[1], initial_window, reset_BL)


def available_backends() -> dict[str, str | None]:
    """Name -> None where this machine can use it, else the reason why not."""
    return backends.available(__name__, BACKENDS)


def final_window(
    x_BLI: Tensor, taps: int, initial_window: Tensor | None = None, reset_BL: Tensor | None = None
) -> Tensor:
    """Return the last K - 1 inputs, `[B, W, I]`, with zeros for inputs of earlier documents."""
    B, L, I = x_BLI.shape
    W = taps - 1
    recent_BLI = x_BLI[:, max(0, L - W) :]
    if L < W:
        before = x_BLI.new_zeros(B, W, I) if initial_window is None else initial_window.to(x_BLI.dtype)
        recent_BLI = torch.cat((before[:, L:], recent_BLI), dim=1)
    if reset_BL is None:
        return recent_BLI.clone()
    ahead = L - torch.arange(L - W, L, device=x_BLI.device)  # 1 at the last token
    last_reset_BL = torch.where(reset_BL, torch.arange(L, device=x_BLI.device), -W)
    document_start_B = last_reset_BL.amax(dim=1) if L else x_BLI.new_full((B,), -W)
    return recent_BLI * ((L - ahead) >= document_start_B[:, None])[:, :, None]


def checked(inputs: Inputs) -> Inputs:
    """Return the inputs if their shapes and options are right, else raise a ValueError."""
    refuse_channel_first("causal_conv1d", "x", inputs.x_BLI, weight=inputs.weight_IK)
    (B, L, I), K = inputs.x_BLI.shape, inputs.weight_IK.shape[-1]
    if not K:
        raise ValueError("causal_conv1d: weight has no taps: its shape is [channels, taps].")
    require_shapes("causal_conv1d", inputs, B=B, L=L, I=I, K=K, W=K - 1)
    if inputs.activation not in ("silu", None):
        raise ValueError(f'causal_conv1d: activation must be "silu" or None, not {inputs.activation!r}')
    return inputs
