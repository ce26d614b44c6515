"""A process's place among the others: it joins the group that torchrun or Slurm started, stands alone, or pretends."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_blackmamba.config import ParallelConfig
from megatron_blackmamba.engine import changes
from megatron_blackmamba.runtime import device, failure, hangs, layout, ports, process
from megatron_blackmamba.runtime.memory import keep_freed_memory

LOCAL_ADDRESSES = {"localhost", "127.0.0.1", "::1"}
TIMEOUT = timedelta(minutes=30)
PATIENCE = timedelta(days=30)
"""Limit of a collective in training: the watchdog ends a hang, and discounts time in which a job is suspended."""

_alone: "list[World]" = []


@dataclass(frozen=True)
class World:
    """The rank of this process and its process groups; `groups` is megatron-core's pg_collection."""

    rank: int
    size: int
    local_rank: int
    parallel: ParallelConfig
    groups: Any
    tensor_rank: int
    pipeline_rank: int
    expert_rank: int
    data_rank: int
    data_size: int
    expert_data_size: int
    context_rank: int = 0
    """Which part of its sequences this rank holds."""

    @property
    def is_main(self) -> bool:
        """Return whether this rank prints, and writes files that are written once."""
        return self.rank == 0

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.parallel.pipeline - 1

    @property
    def data_context_size(self) -> int:
        """Return the number of ranks that reduce gradients together: data parallelism times context parallelism."""
        return self.data_size * self.parallel.context

    def any_rank(self, said: bool) -> bool:
        """Return True on every rank if any rank says so."""
        if self.size == 1:
            return said
        together = torch.tensor([int(said)], device=device.device())
        dist.all_reduce(together, dist.ReduceOp.MAX)
        return bool(together)


def gathered(value: Any) -> list[Any]:
    """Return every rank's value, by rank. Every rank calls this."""
    values = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


class PlaceError(ValueError):
    """The launcher's variables do not say which rank this process is, or where rank 0 listens."""


@dataclass(frozen=True)
class Place:
    """The rank of this process according to its launcher."""

    rank: int
    size: int
    local_rank: int
    launcher: str


def find_place(environment: Mapping[str, str] | None = None) -> Place:
    """Read torchrun's or srun's environment; neither: a process alone."""
    env = os.environ if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        size = _number(env, "WORLD_SIZE", 1)
        local = _number(env, "LOCAL_RANK" if "LOCAL_RANK" in env else "RANK", 0, size - 1)
        return Place(_number(env, "RANK", 0, size - 1), size, local, "torchrun")
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:  # a batch script itself has a SLURM_PROCID, but no step
        size = _number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS", 1)
        local = _number(env, "SLURM_LOCALID", 0, size - 1)
        return Place(_number(env, "SLURM_PROCID", 0, size - 1), size, local, "srun")
    return Place(0, 1, 0, "alone")


def _number(env: Mapping[str, str], name: str, least: int, most: int = 2**31) -> int:
    """Read a variable that the launcher sets."""
    text = env.get(name, "")
    if text.isascii() and text.isdecimal() and least <= int(text) <= most:
        return int(text)
    if name not in env:
        wrong = f"{name} is missing"
    elif most < 2**31:
        wrong = f"{name}={text!r} is not a whole number from {least} to {most}"
    else:
        wrong = f"{name}={text!r} is not a whole number of at least {least}"
    raise PlaceError(
        f"{wrong}: the launcher sets it. Start the ranks with --nproc, torchrun or srun; to train on one process, unset"
        " RANK, WORLD_SIZE and SLURM_STEP_ID."
    )


def start(parallel: ParallelConfig, timeout: timedelta = TIMEOUT, joined: Callable[[], None] = lambda: None) -> World:
    """Join the others, take a device, and lay megatron-core's process groups.

    joined: Called between the two, when the ranks can talk; ranks that disagree on the layout would wait for ever.
    """
    place = find_place()
    return alone(parallel) if _alone and place.launcher == "alone" else _start(parallel, place, timeout, joined)


def alone(parallel: ParallelConfig) -> World:
    """Return the world of this process alone, started at the first call and never left.

    Models built outside a run share it. A run in the same process uses it too: closing its groups would break them.
    """
    layout.check_world(parallel, 1)
    if not _alone:
        _alone.append(_start(parallel, Place(0, 1, 0, "alone"), TIMEOUT))
    if _alone[0].size > 1:
        raise PlaceError("a run cannot use the process group of this script: call train in a script of its own.")
    return _alone[0]


def of_replica(parallel: ParallelConfig) -> World:
    """Return the world for a model that is whole in this process.

    In a process group of the caller, every rank has a replica, and must call this. Otherwise the process is alone.
    """
    layout.refuse_parts(parallel)
    if _alone and not dist.is_initialized():  # its group was destroyed by the caller
        _forget_groups()
    if _alone:
        return _alone[0]
    if not dist.is_initialized():
        size = find_place().size
        if size > 1:
            raise PlaceError(
                f"this is one of {size} processes without a process group, and nothing would synchronise their models:"
                " call torch.distributed.init_process_group() first."
            )
        return alone(parallel)
    _prepare()
    _alone.append(_lay_groups(parallel, Place(dist.get_rank(), dist.get_world_size(), 0, "caller")))
    return _alone[0]


def _forget_groups() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    _alone.clear()


def _start(
    parallel: ParallelConfig, place: Place, timeout: timedelta, joined: Callable[[], None] = lambda: None
) -> World:
    _prepare()
    layout.check_world(parallel, place.size)
    if dist.is_initialized():
        raise RuntimeError("this process already has a process group, and a run starts its own: train in a new process")
    device.claim(place.local_rank, place.launcher)
    _join(place, timeout)
    failure.report_as(place.rank, place.size)  # after joining: torch puts a hook of its own before ours
    try:
        joined()
        return _lay_groups(parallel, place)
    except BaseException:
        dist.destroy_process_group()
        raise


def _prepare() -> None:
    process.prepare_cuda()  # --nproc, torchrun and srun all come here, before CUDA's first use
    if not device.has_cuda():
        keep_freed_memory()
    changes.install()


def shutdown() -> None:
    """Leave together: forget the groups and close the connections. Harmless when nothing was started."""
    from megatron.core import parallel_state

    if not dist.is_initialized() or _alone:
        return
    if dist.get_backend() != "fake":
        dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    failure.report_as_alone()


@contextmanager
def fake(parallel: ParallelConfig, world_size: int, rank: int = 0, where: str = "meta") -> Iterator[World]:
    """Simulate any rank of a world of any size: collectives do nothing, and parameters take no memory."""
    import torch.testing._internal.distributed.fake_pg as fake_pg  # registers the backend

    changes.install()
    if _alone and world_size == 1:
        with device.placed_on(torch.device(where)):
            yield _alone[0]
        return
    if dist.is_initialized():
        raise RuntimeError("cannot simulate a world inside a real one: plan in a separate process")
    if not 0 <= rank < world_size:
        raise ValueError(f"a world of {world_size} has no rank {rank}")
    layout.check_world(parallel, world_size)
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=world_size)
    try:
        with device.placed_on(torch.device(where)):
            yield _lay_groups(parallel, Place(rank, world_size, 0, "fake"))
    finally:
        shutdown()


def _join(place: Place, timeout: timedelta) -> None:
    backend = "nccl" if device.has_cuda() else "gloo"
    hangs.record_collectives()
    if place.launcher == "alone":
        _loopback_only()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    set_address(place)
    dist.init_process_group(backend, init_method="env://", rank=place.rank, world_size=place.size, timeout=timeout)


def set_address(place: Place) -> None:
    """Set the variables that say where rank 0 listens, where the launcher did not."""
    if place.launcher == "srun":
        os.environ.setdefault("MASTER_ADDR", _first_node())
        os.environ.setdefault(
            "MASTER_PORT", str(ports.of_job(_number({"SLURM_JOB_ID": "0", **os.environ}, "SLURM_JOB_ID", 0)))
        )
    elif not os.environ.get("MASTER_ADDR"):
        raise PlaceError("MASTER_ADDR is missing: set it to the host of rank 0, or start the ranks with torchrun.")
    _number(os.environ, "MASTER_PORT", 1, 65535)
    if os.environ.get("MASTER_ADDR") in LOCAL_ADDRESSES:
        _loopback_only()


def _loopback_only() -> None:
    """Keep gloo from looking up the host name, which a laptop without network cannot resolve."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _first_node() -> str:
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    if os.environ.get("SLURM_NNODES", "1") == "1":
        return "127.0.0.1"
    try:
        found = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
        return found.stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise RuntimeError(
            f"cannot find the first node of {nodes!r} ({error}): set MASTER_ADDR to the host of rank 0 before srun"
        ) from error


def _lay_groups(parallel: ParallelConfig, place: Place) -> World:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    with changes.during(changes.GROUPS):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor,
            create_gloo_process_groups=False,
        )
    return World(
        rank=place.rank,
        size=place.size,
        local_rank=place.local_rank,
        parallel=parallel,
        groups=ProcessGroupCollection.use_mpu_process_groups(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        expert_data_size=parallel_state.get_expert_data_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
    )
