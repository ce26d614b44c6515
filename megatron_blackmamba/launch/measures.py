"""Measurements that all ranks make together: matrix products, pairs of nodes, collectives over all ranks."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import torch
import torch.distributed as dist

from megatron_blackmamba.launch.verdict import Report

SECONDS = 0.4
"""Time that the matrix products of a rank take on CPUs; twice that on GPUs."""
REPEATS = 5
MIB = 2**18
"""Elements of fp32 in a MiB."""


def matrix_products(device: torch.device) -> float:
    """Return GFLOP/s of matrix products, sustained: a best case would hide a processor that is slowed down."""
    on_gpu = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_gpu else (384, torch.float32)
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    matrix @ matrix
    _settle(device)
    start = time.perf_counter()
    for products in count(1):
        matrix @ matrix
        _settle(device)
        seconds = time.perf_counter() - start
        if seconds > (2 * SECONDS if on_gpu else SECONDS):
            return 2 * size**3 * products / seconds / 1e9
    raise AssertionError


def pair_rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs: every node meets another partner in each, about log2 of them in all.

    This is the circle method of tournaments. With an odd number of nodes one rests in each round.
    """
    seats = nodes + nodes % 2
    everyone = list(range(seats))
    rounds = []
    for _ in range(seats - 1):
        pairs = [(everyone[i], everyone[-1 - i]) for i in range(seats // 2)]
        rounds.append([(a, b) for a, b in pairs if max(a, b) < nodes])
        everyone = [everyone[0], everyone[-1], *everyone[1:-1]]
    wanted = min(len(rounds), max(nodes - 1, 1).bit_length() + 1 + nodes % 2)
    return [rounds[i * len(rounds) // wanted] for i in range(wanted)] if nodes > 1 else []


def pairs(
    nodes: list[str], ranks_of: dict[str, list[int]], rank: int, device: torch.device
) -> Iterator[tuple[str, float]]:
    """Exchange a block with the same local rank of another node, one node per round; yield node and GB/s."""
    mine = next(node for node, ranks in ranks_of.items() if rank in ranks)
    local = ranks_of[mine].index(rank)
    block = torch.full(((256 if device.type == "cuda" else 2) * MIB,), float(rank), device=device)
    received = torch.empty_like(block)
    for pairing in pair_rounds(len(nodes)):
        partner = next((b if nodes[a] == mine else a for a, b in pairing if mine in (nodes[a], nodes[b])), None)
        ranks = ranks_of[nodes[partner]] if partner is not None else []
        if local < len(ranks):
            peer = ranks[local]
            seconds = _time(partial(_exchange, block, received, peer), device)
            if not (received == peer).all():
                raise ValueError(f"what rank {peer} sent arrived corrupted")
            yield nodes[partner or 0], block.nbytes / seconds / 1e9
        dist.barrier()


def _exchange(block: torch.Tensor, received: torch.Tensor, peer: int) -> None:
    both = [dist.P2POp(dist.isend, block, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def all_reduce(world: int, device: torch.device) -> float:
    """Return GB/s of bus bandwidth: the bytes that a rank must send and receive in a ring."""
    vector = torch.ones((256 if device.type == "cuda" else 4) * MIB, device=device)

    def reduce() -> None:
        vector.fill_(1.0)
        dist.all_reduce(vector)

    seconds = _time(reduce, device)
    low, high = vector.aminmax()
    if not low == high == world:
        raise ValueError(f"an all-reduce of ones gave {low} to {high} instead of {world}")
    return vector.nbytes * 2 * (world - 1) / world / seconds / 1e9


def all_to_all(world: int, rank: int, device: torch.device) -> float:
    """Return GB/s that a rank sends to the others."""
    each = (256 if device.type == "cuda" else 4) * MIB // world
    sent = torch.full((world * each,), float(rank), device=device)
    received = torch.empty_like(sent)
    seconds = _time(lambda: dist.all_to_all_single(received, sent), device)
    if not torch.equal(received.view(world, each)[:, 0].cpu(), torch.arange(world, dtype=torch.float32)):
        raise ValueError("an all-to-all mixed up its parts")
    return sent.nbytes * (world - 1) / world / seconds / 1e9


def measure(
    report: Report, nodes: list[str], ranks_of: dict[str, list[int]], device: torch.device, at: Callable
) -> None:
    """Measure everything, and keep the better of this and what the report has from before."""
    world = dist.get_world_size()
    at("matrix products")
    report.product = max(report.product or 0.0, matrix_products(device))
    at("pairs of nodes")
    for partner, rate in pairs(nodes, ranks_of, report.rank, device):
        report.pairs[partner] = max(report.pairs.get(partner, 0.0), rate)
    if world > 1:
        at("all-reduce")
        report.all_reduce = max(report.all_reduce or 0.0, all_reduce(world, device))
        at("all-to-all")
        report.all_to_all = max(report.all_to_all or 0.0, all_to_all(world, report.rank, device))
    at("the verdict")


def _time(work: Callable[[], object], device: torch.device) -> float:
    """Return the mean seconds of a repeat, after one to warm up and a barrier."""
    work()
    _settle(device)
    start = time.perf_counter()
    for _ in range(REPEATS):
        work()
    _settle(device)
    return (time.perf_counter() - start) / REPEATS


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
