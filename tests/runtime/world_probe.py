"""Report what ranks see when they start a world with torchrun, with Slurm's variables, or forked like torchrun."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_blackmamba.config import ParallelConfig
from megatron_blackmamba.engine import changes
from megatron_blackmamba.runtime import layout, seeding, world
from tests.runtime.ranks import fork_ranks

CUDA_SETTINGS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def describe(us: world.World) -> dict:
    names = (
        "rank",
        "size",
        "tensor_rank",
        "pipeline_rank",
        "expert_rank",
        "data_rank",
        "data_size",
        "expert_data_size",
    )
    members = {name: dist.get_process_group_ranks(getattr(us.groups, name)) for name in ("tp", "pp", "ep", "dp")}
    settings = {name: os.environ.get(name) for name in CUDA_SETTINGS}
    stage = {"first": us.is_first_stage, "last": us.is_last_stage}
    return {name: getattr(us, name) for name in names} | members | stage | {"settings": settings}


def four_in_a_square() -> dict:
    """TP2 × PP2: who is where?"""
    us = world.start(ParallelConfig(tensor=2, pipeline=2, expert=1, expert_tensor=2))
    seen = describe(us)
    total = torch.tensor([us.rank])
    dist.all_reduce(total, group=us.groups.tp)
    seen["sum_of_tensor_group"] = int(total)
    world.shutdown()
    world.shutdown()
    seen["left"] = not dist.is_initialized()
    return seen


def names_of_threads() -> list[str]:
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def twice_alone() -> dict:
    """A process alone starts, leaves, and starts again; megatron-core's random trackers repeat."""
    drawn = []
    for _ in range(2):
        us = world.start(ParallelConfig())
        seeding.seed_process(7)
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        with get_cuda_rng_tracker().fork():
            drawn.append(torch.rand(3).tolist())
        drawn.append(torch.rand(3).tolist())
        end = time.monotonic() + 10
        while (looping := names_of_threads().count("gloo_tcp_loop")) == 1 and time.monotonic() < end:
            time.sleep(0.01)  # the other one takes its name as it starts
        world.shutdown()
    return {"drawn": drawn, "size": us.size, "looping": looping, "card": os.environ.get("GLOO_SOCKET_IFNAME")}


def refused() -> dict:
    try:
        world.start(ParallelConfig(tensor=2))
    except layout.LayoutError as error:
        return {"refused": str(error)}
    return {}


def pretended() -> dict:
    """All ranks of a world of 64, in one process."""
    parallel = ParallelConfig(tensor=2, pipeline=2, expert=8)
    places = []
    for rank in range(64):
        with world.fake(parallel, 64, rank) as us:
            places.append((us.tensor_rank, us.pipeline_rank, us.data_rank))
    return {"distinct": len(set(places)), "left": not dist.is_initialized(), "device": torch.empty(1).device.type}


def fail_on_one() -> None:
    """Rank 1 divides by zero while the others wait for it."""
    us = world.start(ParallelConfig())
    if us.rank == 1:
        time.sleep(0.2)
        print(1 / 0)
    dist.all_reduce(torch.zeros(1))
    raise AssertionError("the others never got past their collective")


def main(scenario: str) -> None:
    if scenario == "forked":
        changes.install()
        answers = {
            "square": fork_ranks(4, four_in_a_square),
            "alone": fork_ranks(1, twice_alone, alone=True),
            "refused": fork_ranks(3, refused),
            "pretended": fork_ranks(1, pretended, alone=True),
        }
    elif scenario == "describe":
        answers = describe(world.start(ParallelConfig(expert=2)))
        world.shutdown()
    else:
        answers = fail_on_one()
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
