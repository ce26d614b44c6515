"""The one place that decides where tensors live: a GPU if there is one, else the CPU, or `meta` for a plan."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

import torch

from megatron_blackmamba.runtime import machine

SHARED = "BLACKMAMBA_SHARE_GPUS"
"""Variable that lets several processes of one machine share a GPU, to test layouts with NCCL. It is slow."""

_placed: list[torch.device] = []


class DeviceError(ValueError):
    """An error for a process without its own GPU; the message says how to start instead."""


def has_cuda() -> bool:
    """Return whether this process can use a GPU."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """Return the device on which this process builds its model and computes."""
    if _placed:
        return _placed[-1]
    if has_cuda():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def name() -> str:
    """Return the name of the GPU of this process, or of the processor."""
    return torch.cuda.get_device_name() if has_cuda() else machine.processor()


def is_pretended() -> bool:
    """Return whether this process builds for another device than its own, as a plan does."""
    return bool(_placed)


def claim(local_rank: int, launcher: str) -> torch.device:
    """Take the GPU that belongs to this process on its machine; on a machine without GPUs, the CPU."""
    if has_cuda():
        torch.cuda.set_device(gpu_of(local_rank, launcher))
        if is_shared():
            _appear_as_another_host(local_rank)
    return device()


def is_shared() -> bool:
    """Return whether the environment lets several processes share a GPU."""
    return os.environ.get(SHARED) == "1"


def _appear_as_another_host(local_rank: int) -> None:
    """Set what lets NCCL run several ranks on one GPU, before its first use: it refuses two ranks of one host.

    Ranks of different hosts talk over sockets, here of the loopback interface, so all ranks must be on one machine.
    """
    os.environ.setdefault("NCCL_HOSTID", f"rank-{local_rank}")
    os.environ.setdefault("NCCL_NET", "Socket")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def gpu_of(local_rank: int, launcher: str) -> int:
    """Return the number of this process's GPU among those that it sees.

    Under srun that may be one, another one for each task. Of several tasks with the same GPU, NCCL says so.
    With BLACKMAMBA_SHARE_GPUS=1 the processes take the GPUs in turn.
    """
    count = torch.cuda.device_count()
    if is_shared():
        return local_rank % count
    if count == 1 and launcher == "srun":
        return 0
    if local_rank >= count:
        raise DeviceError(
            f"process {local_rank} of this machine finds only {count} GPU(s)"
            f" (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')})."
            " Start one process per GPU, with all GPUs of the machine visible to each, or under srun one"
        )
    return local_rank


def copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors on this process's device; the host does not wait for copies from pinned memory."""
    return {name: tensor.to(device(), non_blocking=True) for name, tensor in tensors.items()}


@contextmanager
def placed_on(where: torch.device) -> Iterator[None]:
    """Build everything on `where` within this context, including megatron-core modules that name another device."""
    _placed.append(where)
    current_device = mock.patch.object(torch.cuda, "current_device", lambda: where)
    moved = mock.patch.object(torch.Tensor, "cuda", lambda self, *_, **__: self.to(where))
    try:
        with where, current_device, moved:
            yield
    finally:
        _placed.pop()
