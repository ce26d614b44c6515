"""The order of tokens by expert in Triton: a counting sort in two launches, without atomics.

Each program takes neighbouring pairs. The first launch counts their experts. In the second a program adds up the counts
before its own, and so knows the place of each of its pairs.

Shapes: P pairs of a token and an expert, E experts, Q programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_blackmamba.ops.backends import Takes

TAKES = Takes("cuda")
PROGRAMS = 128
TILE = 4096  # numbers that a program has at once
MOST_EXPERTS = 256


def unsupported(choice_P: Tensor, experts: int) -> str | None:
    if not choice_P.numel():
        return "there are no pairs"
    return None if experts <= MOST_EXPERTS else f"up to {MOST_EXPERTS} experts, not {experts}"


def order_of(choice_P: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    P, block_E = len(choice_P), triton.next_power_of_2(experts)
    block_P = TILE // block_E
    blocks = triton.cdiv(P, block_P)
    each = triton.cdiv(blocks, PROGRAMS)
    programs = triton.cdiv(blocks, each)
    counts_QE = choice_P.new_empty(programs, experts, dtype=torch.int32)
    order_P, place_P, pairs_E = choice_P.new_empty(P), choice_P.new_empty(P), choice_P.new_empty(experts)
    shape = {"E": experts, "BLOCK_E": block_E, "BLOCK_P": block_P, "num_warps": 4}
    with torch.cuda.device_of(choice_P):
        count_pairs[(programs,)](choice_P, counts_QE, P, each * block_P, **shape)
        place_pairs[(programs,)](
            choice_P, counts_QE, order_P, place_P, pairs_E, P, each * block_P,
            BLOCK_Q=min(block_P, triton.next_power_of_2(programs)), **shape,
        )  # fmt: skip
    return order_P, place_P, pairs_E


@triton.jit
def _chosen(choice_P, p, last, e):
    """Return as 0 and 1 the expert of each pair."""
    choice = tl.load(choice_P + p, mask=p < last, other=-1).to(tl.int32)
    return (choice[:, None] == e[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["P", "each"])
def count_pairs(choice_P, counts_QE, P, each, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr):
    q = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    last = tl.minimum((q + 1) * each, P)
    counts_E = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(q * each, last, BLOCK_P):
        counts_E += tl.sum(_chosen(choice_P, first + tl.arange(0, BLOCK_P), last, e), 0)
    tl.store(counts_QE + q * E + e, counts_E, mask=e < E)


@triton.jit(do_not_specialize=["P", "each"])
def place_pairs(
    choice_P, counts_QE, order_P, place_P, pairs_E, P, each,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    mine = tl.program_id(0)
    programs = tl.num_programs(0)
    e = tl.arange(0, BLOCK_E)
    total_E = tl.zeros((BLOCK_E,), tl.int32)
    next_E = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, programs, BLOCK_Q):
        q = first + tl.arange(0, BLOCK_Q)
        inside = (q[:, None] < programs) & (e[None, :] < E)
        counts_QE_ = tl.load(counts_QE + q[:, None] * E + e[None, :], mask=inside, other=0)
        total_E += tl.sum(counts_QE_, 0)
        next_E += tl.sum(tl.where(q[:, None] < mine, counts_QE_, 0), 0)
    next_E += tl.cumsum(total_E, 0) - total_E
    tl.store(pairs_E + e, total_E.to(tl.int64), mask=(e < E) & (mine == 0))
    last = tl.minimum((mine + 1) * each, P)
    for first in range(mine * each, last, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        chosen_PE = _chosen(choice_P, p, last, e)
        place = tl.sum(chosen_PE * (next_E[None, :] + tl.cumsum(chosen_PE, 0) - 1), 1)
        tl.store(place_P + p, place.to(tl.int64), mask=p < last)
        tl.store(order_P + place, p.to(tl.int64), mask=p < last)
        next_E += tl.sum(chosen_PE, 0)
