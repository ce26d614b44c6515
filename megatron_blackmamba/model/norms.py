"""Norms over the residual stream (fp32, or float64), which return what the layer behind computes in, and in mixers.

megatron-core's WrappedTorchNorm refuses sequence parallelism, where all it takes is a mark on the parameters.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_blackmamba import norms
from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.sharding import empty, replicated, without_decay
from megatron_blackmamba.ops.gated_norm import gated_rms_norm
from megatron_blackmamba.ops.rms_norm import norm_and_stream, rms_norm

from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
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


class LastNorm(nn.Module):
    """The last norm, as its kind (`norms/`) computes it, in fp32 or float64."""

    def __init__(self, config: MegatronConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.kind, self.eps, self.dtype = norms.kind_of(config.described.final_norm), eps, config.params_dtype
        self.compute = torch.promote_types(self.dtype, torch.float32)
        self.own = self.kind.own(config.described)
        for name in self.kind.parameters:
            parameter = replicated(empty(hidden_size, dtype=self.dtype), config.sequence_parallel)
            self.register_parameter(name, without_decay(parameter))

    def forward(self, x: Tensor) -> Tensor:
        parameters_D = tuple(getattr(self, name).to(self.compute) for name in self.kind.parameters)
        return self.kind.apply(x.to(self.compute), parameters_D, self.eps, *self.own).to(self.dtype)


class Affine(nn.Module):
    """A learned bias and scale of each channel (`model.residual_scaling`), in fp32 or float64."""

    def __init__(self, config: MegatronConfig):
        super().__init__()
        self.scale, self.bias = (
            without_decay(replicated(empty(config.hidden_size, dtype=config.params_dtype), config.sequence_parallel))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        compute = torch.promote_types(x.dtype, torch.float32)
        return ((x.to(compute) + self.bias.to(compute)) * self.scale.to(compute)).to(x.dtype)


class GatedNorm(nn.Module):
    """The norm of each group's gated channels."""

    def __init__(self, channels: int, groups: int, config: TransformerConfig):
        super().__init__()
        self.groups, self.eps = groups, config.layernorm_epsilon
        self.weight = without_decay(empty(channels, dtype=config.params_dtype))

    def forward(self, x_BSI: Tensor, gate_BSI: Tensor) -> Tensor:
        return gated_rms_norm(x_BSI, gate_BSI, self.weight, self.groups, self.eps)


class GroupNorm(nn.Module):
    """The RMS norm of B or C, or of the scan's output in front of its gate, each group by itself."""

    def __init__(self, channels: int, groups: int, config: TransformerConfig):
        super().__init__()
        self.groups, self.eps = groups, config.layernorm_epsilon
        self.weight = without_decay(empty(channels, dtype=config.params_dtype))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return the norm of x, with a gate times its SiLU."""
        if gate is not None:
            return gated_rms_norm(x, gate, self.weight, self.groups, self.eps, norm_first=True)
        compute = torch.promote_types(x.dtype, torch.float32)
        x_GN = x.to(compute).unflatten(-1, (self.groups, -1))
        normal_GN = F.rms_norm(x_GN, x_GN.shape[-1:], None, self.eps)
        return (normal_GN.flatten(-2) * self.weight.to(compute)).to(x.dtype)


class SharedNorm(nn.Module):
    """The RMS norm of B or C of each group, with one weight for all groups of all ranks."""

    def __init__(self, size: int, config: TransformerConfig, group: ProcessGroup):
        super().__init__()
        self.eps, self.group = config.layernorm_epsilon, group
        self.weight = without_decay(replicated(empty(size, dtype=config.params_dtype), sequence_parallel=False))

    def forward(self, x_RGN: Tensor) -> Tensor:
        compute = torch.promote_types(x_RGN.dtype, torch.float32)
        weight_N = copy_to_tensor_model_parallel_region(self.weight, group=self.group).to(compute)
        return F.rms_norm(x_RGN.to(compute), weight_N.shape, weight_N, self.eps).to(x_RGN.dtype)
