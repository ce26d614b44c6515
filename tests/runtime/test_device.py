"""Which GPU a process takes, by what its launcher lets it see."""

import os

import pytest
import torch

from megatron_blackmamba.runtime import device


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Restore the environment after each test, and hide the caller's settings from it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", device.SHARED))}
    monkeypatch.setattr(os, "environ", kept)
    return kept


@pytest.fixture
def taken(monkeypatch):
    """Claim a GPU where this many are visible; return its number."""

    def claim(visible, local_rank, launcher):
        numbers = []
        monkeypatch.setattr(device, "has_cuda", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
        monkeypatch.setattr(torch.cuda, "set_device", numbers.append)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: numbers[-1])
        found = device.claim(local_rank, launcher)
        assert found == torch.device("cuda", numbers[-1])
        return numbers[-1]

    return claim


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_process_takes_the_gpu_of_its_local_rank(taken, launcher):
    assert [taken(8, rank, launcher) for rank in range(8)] == list(range(8))


def test_task_of_srun_takes_its_only_gpu(taken):
    assert [taken(1, rank, "srun") for rank in range(8)] == [0] * 8


@pytest.mark.parametrize(("visible", "launcher"), [(1, "torchrun"), (2, "srun"), (2, "torchrun")])
def test_two_processes_never_take_the_same_gpu(taken, visible, launcher):
    with pytest.raises(device.DeviceError, match=f"process {visible} of this machine finds only {visible} GPU"):
        taken(visible, visible, launcher)


def test_processes_share_gpus_when_asked(taken, environment):
    environment[device.SHARED] = "1"
    assert [taken(1, rank, "torchrun") for rank in range(4)] == [0] * 4
    assert [taken(2, rank, "torchrun") for rank in range(4)] == [0, 1, 0, 1]


def test_nccl_takes_sharing_ranks_for_other_hosts(taken, environment):
    taken(8, 3, "torchrun")
    assert not any(name.startswith("NCCL_") for name in environment)  # only when asked
    environment[device.SHARED] = "1"
    seen = set()
    for rank in range(4):
        environment.pop("NCCL_HOSTID", None)
        taken(1, rank, "torchrun")
        seen.add(environment["NCCL_HOSTID"])
    assert len(seen) == 4
    assert environment["NCCL_SOCKET_IFNAME"] == "lo" and environment["NCCL_NET"] == "Socket"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cpus_answer_for_a_gpu_of_any_number():
    import megatron_blackmamba.engine  # noqa: F401

    torch.cuda.set_device(3)
    torch.cuda.synchronize()
    assert torch.cuda.current_device() == torch.device("cpu")
