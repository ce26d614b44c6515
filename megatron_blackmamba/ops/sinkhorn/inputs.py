"""The arguments of one call of `sinkhorn_choice`, as its backends receive them."""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor


class Inputs(NamedTuple):
    """Shapes: T tokens, E experts."""

    logits_TE: Tensor
    iterations: int = 1
    temperature: float = 2.0
    start: str = "balanced"
    group: dist.ProcessGroup | None = None
    bound: float = 0.0
    """Iterations after the first change nothing once no expert has more than this multiple of the mean share."""
