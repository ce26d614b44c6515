"""Checks of the arguments of ops: number formats and shapes."""

from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def require_floats(op: str, **tensors: Tensor | None) -> None:
    """Refuse complex numbers, integers and 8-bit floats, by the name of the op and of its argument."""
    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise ValueError(f"{op}: {name} must be a tensor, not {tensor!r}.")
        if tensor is not None and tensor.dtype not in FLOATS:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
            raise ValueError(f"{op}: {name} is {str(tensor.dtype).removeprefix('torch.')}. Pass one of {known}.")


def require_shape(op: str, name: str, tensor: Tensor | None, *expected: int) -> None:
    """Refuse a tensor of another shape; kernels would read or write beyond it."""
    if tensor is not None and tensor.shape != expected:
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}. Pass {expected}.")


def require_dimensions(op: str, name: str, tensor: Tensor, number: int) -> None:
    """Refuse a tensor with another number of dimensions."""
    require_floats(op, **{name: tensor})
    if tensor.dim() != number:
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}. Pass {number} dimensions.")


def require_shapes(op: str, inputs: Any, **sizes: int) -> None:
    """Refuse a tensor that does not have the shape that its name ends in.

    Args:
        inputs: A NamedTuple, or a dictionary. All tensors in it are floats, except for the bool tensor `reset`.
        sizes: The size of each letter.
    """
    fields = inputs if isinstance(inputs, dict) else inputs._asdict()
    for field, tensor in fields.items():
        name, _, letters = field.rpartition("_")
        if not isinstance(tensor, Tensor):
            if tensor is not None and letters.isupper():
                require_floats(op, **{name: tensor})
            continue
        expected = tuple(map(sizes.__getitem__, letters))
        if tensor.shape != expected:
            called, first = next(iter(fields.items()))
            of = f"{called.rpartition('_')[0]} is {tuple(first.shape)}"
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {expected} ({of})")
        if name != "reset":
            if tensor.dtype not in FLOATS:
                require_floats(op, **{name: tensor})
        elif tensor.dtype != torch.bool:
            raise ValueError(f"{op}: reset must be a bool tensor, not {tensor.dtype}")


def refuse_channel_first(op: str, name: str, x_BLI: Tensor, others: str = "", **weights: Tensor) -> None:
    """Refuse `[B, I, L]`, the order of mamba-ssm and causal-conv1d. A weight has two dimensions, channels first.

    Shapes: B batch, L length, I inner channels.
    """
    (weight_name, weight), *_ = weights.items()
    require_floats(op, **{name: x_BLI}, **weights)
    require_dimensions(op, weight_name, weight, 2)
    channels = weight.shape[0]
    if x_BLI.dim() != 3:
        raise ValueError(
            f"{op}: {name} has shape {tuple(x_BLI.shape)}. Pass three dimensions: batch, length, channels."
        )
    if x_BLI.shape[1] == channels != x_BLI.shape[2]:
        raise ValueError(
            f"{op}: {name} is channel-first, {tuple(x_BLI.shape)}, the order of mamba-ssm and causal-conv1d."
            f" Pass (batch, length, channels): {name}.transpose(1, 2){others}."
        )
