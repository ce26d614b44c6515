"""The cost of a step: its peak memory, and its MFU on a GPU whose peak FLOP/s are known."""

import resource
import sys

import torch

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.plan import flops
from megatron_blackmamba.plan.gpus import KNOWN, Gpu

SLOWER_CARDS = {"H100": {"PCIE", "NVL"}, "H200": {"NVL"}}
"""Variants of a GPU with less than the peak we know of."""


def memory_bytes() -> int:
    """Return the peak memory of this rank so far: GPU memory, or the memory of the process without a GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Utilisation:
    """Model FLOPs utilisation of the whole world; None where the peak is not known."""

    def __init__(self, config: RunConfig, world_size: int, device_name: str | None = None) -> None:
        if device_name is None and torch.cuda.is_available():
            device_name = torch.cuda.get_device_name()
        gpu = known_gpu(device_name or "")
        self._peak = gpu.peak(config.training.precision) * world_size if gpu else None
        self.flops_per_token = flops.training(config.model, config.data.sequence_length)
        """Of the model, without recomputation."""

    def of(self, tokens: int, seconds: float) -> float | None:
        return None if self._peak is None else self.flops_per_token * tokens / seconds / self._peak


def known_gpu(device_name: str) -> Gpu | None:
    """Return the specification of the GPU with this driver name, if known."""
    words = device_name.upper().replace("-", " ").split()
    if "MIG" in words:  # a part of a GPU
        return None
    found = next((name for name in KNOWN if name.upper() in words), None)
    return None if found is None or SLOWER_CARDS.get(found.upper(), set()) & set(words) else KNOWN[found]
