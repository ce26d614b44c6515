"""Modules with a weight and perhaps a bias for each channel of this rank, and the convolution along the sequence.

Shapes: S sequence, B batch, I channels of this rank.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_blackmamba.model.sharding import without_decay
from megatron_blackmamba.ops.causal_conv1d import causal_conv1d
from megatron_blackmamba.ops.causal_conv1d.part import causal_conv1d_part


class Channels(nn.Module):
    """A weight and perhaps a bias for this rank's channels, split along the first axis.

    Subclasses compute in `forward`, and the mixer calls them as modules: only a module's call waits for its parameters
    while `training.overlap` gathers them.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None):
        super().__init__()
        self.weight, self.bias = weight, None if bias is None else without_decay(bias)


class Convolution(Channels):
    """The causal convolution along the sequence, one filter a channel, then SiLU."""

    def forward(self, x_BSI: Tensor, reset_BS: Tensor | None, context: ProcessGroup | None = None) -> Tensor:
        """Convolve; `context` is the group of ranks with the other parts of these sequences."""
        convolve: Any = causal_conv1d
        if context is not None:
            convolve = partial(causal_conv1d_part, group=context)
        return convolve(x_BSI, self.weight.squeeze(1), self.bias, reset_BL=reset_BS)
