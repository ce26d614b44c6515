"""The arithmetic of Mamba-1 between convolution and scan, for training, reading a prompt, and a step of decoding."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.layers.rows import Weight

Map = Callable[[Tensor], Tensor]


def of_scan(
    x: Tensor,
    rows: Weight,
    project: Map,
    norms: Sequence[Map],
    project_dt: Callable[[Tensor], Any],
    shared: Map = lambda product: product,
) -> tuple[Any, Tensor, Tensor]:
    """Return the projection of dt, and B and C.

    Args:
        x: The channels behind the convolution.
        rows: Of x_proj, whose product is `project`.
        norms: Of dt, B and C, with model.mamba_norms.
        shared: Returns what all ranks share, for the channels of this rank.
    """
    product = project(x)
    if norms:
        product = torch.cat([norm(part) for norm, part in zip(norms, rows.split(product), strict=True)], dim=-1)
    dt, B, C = rows.split(shared(product))
    return project_dt(dt), B, C
