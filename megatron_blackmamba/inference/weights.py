"""A model's weights as decoding wants them: fused where the step reads them together, experts stacked, read once.

Shapes: V vocabulary, D model, I inner, K taps, N state, R rank of dt, E experts, F expert hidden, G = 2F gate and up.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.interchange.canonical import Canonical


@dataclass(frozen=True)
class MambaLayer:
    """The recurrence's own parameters, and all norms, are fp32 whatever the rest is."""

    norm_D: Tensor
    in_proj: Tensor
    conv_weight_IK: Tensor
    conv_bias_I: Tensor
    x_proj: Tensor
    dt_proj_IR: Tensor
    dt_bias_I: Tensor
    A_IN: Tensor
    D_I: Tensor
    out_proj: Tensor


@dataclass(frozen=True)
class ExpertsLayer:
    norm_D: Tensor
    router_ED: Tensor
    router_bias_E: Tensor
    fc1_EGD: Tensor
    fc2_EDF: Tensor


@dataclass(frozen=True)
class Weights:
    config: ModelConfig
    embedding_VD: Tensor
    layers: tuple[MambaLayer | ExpertsLayer, ...]
    final_norm_D: Tensor
    final_bias_D: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_VD.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding_VD.device

    @property
    def bytes_a_token(self) -> int:
        """What one step at batch 1 reads: everything but the experts that were not chosen."""
        total = self.embedding_VD.nbytes + self.final_norm_D.nbytes + self.final_bias_D.nbytes
        for layer in self.layers:
            for tensor in vars(layer).values():
                stacked = tensor.dim() == 3
                total += tensor.nbytes // (tensor.shape[0] if stacked else 1)
        return total


def pack(model: Canonical, dtype: torch.dtype, device: torch.device | str = "cpu") -> Weights:
    """Read every tensor once, straight to its place."""

    def get(name: str, as_type: torch.dtype = torch.float32) -> Tensor:
        return model.entries[name].load().to(device=device, dtype=as_type)

    layers: list[MambaLayer | ExpertsLayer] = []
    for i, letter in enumerate(model.config.pattern):
        layer = f"decoder.layers.{i}."
        layers.append((_mamba if letter == "M" else _experts)(get, layer, model.config, dtype, device))
    return Weights(
        model.config,
        get("embedding.word_embeddings.weight", dtype),
        tuple(layers),
        get("decoder.final_layernorm.weight"),
        get("decoder.final_layernorm.bias"),
    )


def _mamba(get: Any, layer: str, config: ModelConfig, dtype: torch.dtype, device: Any) -> MambaLayer:
    return MambaLayer(
        norm_D=get(layer + "norm.weight"),
        in_proj=get(layer + "mixer.in_proj.weight", dtype),
        conv_weight_IK=get(layer + "mixer.conv1d.weight")[:, 0].contiguous(),
        conv_bias_I=get(layer + "mixer.conv1d.bias"),
        x_proj=get(layer + "mixer.x_proj.weight", dtype),
        dt_proj_IR=get(layer + "mixer.dt_proj.weight", dtype),
        dt_bias_I=get(layer + "mixer.dt_proj.bias"),
        A_IN=-torch.exp(get(layer + "mixer.A_log")),
        D_I=get(layer + "mixer.D"),
        out_proj=get(layer + "mixer.out_proj.weight", dtype),
    )


def _experts(get: Any, layer: str, config: ModelConfig, dtype: torch.dtype, device: Any) -> ExpertsLayer:
    D, E, F = config.hidden_size, config.experts, config.expert_hidden_size or 0
    fc1_EGD = torch.empty(E, 2 * F, D, dtype=dtype, device=device)
    fc2_EDF = torch.empty(E, D, F, dtype=dtype, device=device)
    for e in range(E):
        fc1_EGD[e] = get(f"{layer}mixer.local_experts.{e}.linear_fc1.weight", dtype)
        fc2_EDF[e] = get(f"{layer}mixer.local_experts.{e}.linear_fc2.weight", dtype)
    return ExpertsLayer(
        norm_D=get(layer + "norm.weight"),
        router_ED=get(layer + "mixer.router.weight"),
        router_bias_E=get(layer + "mixer.router.bias"),
        fc1_EGD=fc1_EGD,
        fc2_EDF=fc2_EDF,
    )


def fitting_dtype(model: Canonical, device: torch.device) -> torch.dtype:
    """The precision the weights are stored in, or bf16 where fp32 would take more than half of the free memory."""
    if model.dtype != torch.float32:
        return torch.bfloat16
    needed = 4 * model.parameters
    return torch.float32 if needed < free_bytes(device) / 2 else torch.bfloat16


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            available = next(line for line in file if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
