"""Checks of shapes that several operations share. Shapes: B batch, L length, I inner channels."""

from torch import Tensor


def refuse_channel_first(operation: str, name: str, x_BLI: Tensor, weight: Tensor, others: str = "") -> None:
    """Refuse `[B, I, L]`, the order of mamba-ssm and causal-conv1d. `weight` has the channels first."""
    channels = weight.shape[0]
    if x_BLI.dim() != 3:
        raise ValueError(
            f"{operation}: {name} has shape {tuple(x_BLI.shape)}. Pass three dimensions: batch, length, channels."
        )
    if x_BLI.shape[1] == channels != x_BLI.shape[2]:
        raise ValueError(
            f"{operation}: {name} is channel-first, {tuple(x_BLI.shape)}, the order of mamba-ssm and causal-conv1d."
            f" Pass (batch, length, channels): {name}.transpose(1, 2){others}."
        )
