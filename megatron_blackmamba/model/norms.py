"""Norms over the residual stream (fp32, or float64); they return what the layer behind them computes in.

megatron-core's WrappedTorchNorm refuses sequence parallelism, where all it takes is a mark on the parameters.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_blackmamba.model.sharding import empty, replicated, without_decay
from megatron_blackmamba.ops.rms_norm import norm_and_stream, rms_norm

from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(nn.Module):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = without_decay(replicated(empty(hidden_size, dtype=config.params_dtype), config.sequence_parallel))

    def forward(
        self, x: Tensor, branch: Tensor | None = None, and_stream: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm of x, plus `branch` if there is one; with `and_stream` also this sum to go on with."""
        if and_stream:
            return norm_and_stream(x, self.weight, self.eps, branch)
        return rms_norm(x if branch is None else x + branch, self.weight, self.eps)


class LayerNorm(nn.Module):
    """With bias: a kind of the last norm (`norms/layer.py`)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.dtype = config.params_dtype
        self.compute = torch.promote_types(self.dtype, torch.float32)
        self.weight = without_decay(replicated(empty(hidden_size, dtype=self.dtype), config.sequence_parallel))
        self.bias = without_decay(replicated(empty(hidden_size, dtype=self.dtype), config.sequence_parallel))

    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = (t.to(self.compute) for t in (x, self.weight, self.bias))
        return F.layer_norm(x, weight.shape, weight, bias, self.eps).to(self.dtype)
