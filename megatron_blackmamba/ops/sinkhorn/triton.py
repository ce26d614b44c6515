"""Sinkhorn routing in Triton: from logits to choices in two launches, without synchronising with the host.

Every pass ends at a sum over all tokens, which the next one needs. Up to ONE_PROGRAM logits, one program makes all the
passes and leaves the experts' offsets; a second launch, of many programs, chooses and counts. One processor of the GPU
then works while the others wait, for a few microseconds a pass, which is about what a launch takes.

More logits, or a process group, take a launch a pass: programs leave their partial sums, and every program of the next
launch adds them up in the same order. With a group the partial sums are added here and exchanged, E numbers a time,
before the next launch reads them. (A barrier among programs would save these launches. It hangs where they do not all
fit on the GPU at once, and cannot be tested without one.)

All of it stays in logarithms (of base 2, which GPUs prefer): X = temperature * logits + offset of the expert. An update
of the experts subtracts from each offset the log of its column's sum of exp(X); before it, an iteration divides each
token's row by its own sum. So no logit is too large, and no column can vanish.

Shapes: T tokens, E experts, P programs.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from megatron_blackmamba.ops.backends import UP_TO_FP32, Takes
from megatron_blackmamba.ops.sinkhorn.inputs import Inputs
from megatron_blackmamba.ops.triton_math import LOG2E

TAKES = Takes("cuda", UP_TO_FP32)
ONE_PROGRAM = 1 << 18  # most logits for one program: twice 16,384 tokens * 8 experts
TILE = 8192  # most numbers that a program reads at once
BLOCK_T, PROGRAMS = 128, 128  # for several programs, if TILE allows
LOWEST = tl.constexpr(-1e38)


def unsupported(inputs: Inputs) -> str | None:
    logits_TE = inputs.logits_TE
    if logits_TE.shape[0] == 0:
        return "there are no tokens"
    return None if logits_TE.shape[1] <= 256 else f"up to 256 experts, not {logits_TE.shape[1]}"


def choice(inputs: Inputs, tokens_E: Tensor | None = None, bias_E: Tensor | None = None) -> Tensor:
    inputs = inputs._replace(logits_TE=inputs.logits_TE.contiguous())
    with torch.cuda.device_of(inputs.logits_TE):
        columns = _found(inputs)
        if bias_E is not None:
            bias_E += _bias(columns, inputs.temperature)
        return _choose_experts(inputs.logits_TE, columns, inputs.temperature, tokens_E)


def bias(inputs: Inputs) -> Tensor:
    """Return what the plan adds to the logits of each expert, up to a constant."""
    with torch.cuda.device_of(inputs.logits_TE):
        found = _found(inputs._replace(logits_TE=inputs.logits_TE.contiguous()))
        return _bias(found, inputs.temperature)


def _bias(columns: "_Columns", temperature: float) -> Tensor:
    return columns.offset_E() / (temperature * LOG2E.value)


def _choose_experts(logits_TE: Tensor, columns: "_Columns", temperature: float, tokens_E: Tensor | None) -> Tensor:
    T, E = logits_TE.shape
    choice_T = torch.empty(T, device=logits_TE.device, dtype=torch.int64)
    count = tokens_E is not None
    shape = _shape(E, columns.parts)
    _choose[(triton.cdiv(T, shape["BLOCK_T"]),)](
        logits_TE, *columns.arguments, choice_T, tokens_E if count else choice_T, T, temperature, COUNT=count, **shape
    )
    return choice_T


def _found(inputs: Inputs) -> "_Columns":
    logits_TE, iterations, temperature, start, group, bound = inputs
    T, E = logits_TE.shape
    passes = [False] * (start == "balanced") + [True] * iterations  # whether rows are normalised first
    if not passes:
        return _Columns.settled(torch.zeros(1, E, dtype=torch.float32, device=logits_TE.device))
    if group is None and T * E <= ONE_PROGRAM:
        return _by_one_program(logits_TE, temperature, passes, bound)
    return _by_a_launch_each(logits_TE, temperature, passes, group, bound)


def _shape(E: int, parts: int) -> dict[str, int]:
    block_E = triton.next_power_of_2(E)
    most = TILE // block_E
    return {
        "E": E,
        "BLOCK_E": block_E,
        "BLOCK_T": min(BLOCK_T, most),
        "BLOCK_P": min(PROGRAMS, most) if parts else 1,
        "num_warps": 4,
    }


def _by_one_program(logits_TE: Tensor, temperature: float, passes: list[bool], bound: float) -> "_Columns":
    T, E = logits_TE.shape
    block_E = triton.next_power_of_2(E)
    offset_1E = torch.empty(1, E, dtype=torch.float32, device=logits_TE.device)
    _find_offsets[(1,)](
        logits_TE, offset_1E, T, len(passes) - 1, temperature, bound,
        E=E, BLOCK_E=block_E, BLOCK_T=TILE // block_E, NORMALISE=passes[0], num_warps=16,
    )  # fmt: skip
    return _Columns.settled(offset_1E)


def _by_a_launch_each(
    logits_TE: Tensor, temperature: float, passes: list[bool], group: dist.ProcessGroup | None, bound: float
) -> "_Columns":
    T, E = logits_TE.shape
    columns = _Columns.settled(torch.zeros(1, E, dtype=torch.float32, device=logits_TE.device))
    for number, normalise in enumerate(passes):
        shape = _shape(E, columns.parts)
        programs = min(PROGRAMS, TILE // shape["BLOCK_E"], triton.cdiv(T, shape["BLOCK_T"]))
        left = _Columns(
            *(torch.empty(rows, E, dtype=torch.float32, device=logits_TE.device) for rows in (1, programs, programs))
        )
        _sum_columns[(programs,)](
            logits_TE, *columns.arguments, *left.tensors, T, temperature, NORMALISE=normalise, **shape
        )
        columns = left.exchanged(group)
        if bound and number > passes.index(True):  # never before the first iteration is done
            columns.bound = bound
    return columns


@dataclass
class _Columns:
    """The buffers between two launches: the current offsets, and partial sums that update them."""

    offset_1E: Tensor
    largest_PE: Tensor
    sums_PE: Tensor  # of exp2(X - largest)
    parts: int = 0
    bound: float = 0.0
    """The offsets stay where no expert has more than this multiple of the mean share of the plan; 0: they never do."""

    @staticmethod
    def settled(offset_1E: Tensor) -> "_Columns":
        return _Columns(offset_1E, offset_1E, offset_1E, parts=0)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.offset_1E, self.largest_PE, self.sums_PE

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, int, float]:
        return *self.tensors, self.parts, self.bound

    def offset_E(self) -> Tensor:
        """Return the offsets after the update, as `_updated_offset` finds them."""
        if not self.parts:
            return self.offset_1E[0]
        largest_E = self.largest_PE.amax(0)
        sum_E = (self.sums_PE * torch.exp2(self.largest_PE - largest_E)).sum(0)
        load_E = sum_E * torch.exp2(largest_E)
        settled = load_E.amax() <= self.bound * load_E.mean()
        return torch.where(settled, self.offset_1E[0], self.offset_1E[0] - largest_E - sum_E.log2())

    def exchanged(self, group: dist.ProcessGroup | None) -> "_Columns":
        if group is None:
            return replace(self, parts=self.sums_PE.shape[0])
        largest_1E = self.largest_PE.amax(0, keepdim=True)
        dist.all_reduce(largest_1E, op=dist.ReduceOp.MAX, group=group)
        sums_1E = (self.sums_PE * torch.exp2(self.largest_PE - largest_1E)).sum(0, keepdim=True)
        dist.all_reduce(sums_1E, group=group)
        return _Columns(self.offset_1E, largest_1E, sums_1E, parts=1)


@triton.jit
def _updated_offset(offset_1E, largest_PE, sums_PE, parts, bound, e, E: tl.constexpr, BLOCK_P: tl.constexpr):
    """Return the offsets after the update from the previous launch's sums, and whether they settled before it.

    Without sums, or once they settled, they stay."""
    p = tl.arange(0, BLOCK_P)
    inside = (p[:, None] < parts) & (e[None, :] < E)
    part_PE = tl.load(largest_PE + p[:, None] * E + e[None, :], mask=inside, other=LOWEST)
    largest_E = tl.max(part_PE, 0)
    sums_PE = tl.load(sums_PE + p[:, None] * E + e[None, :], mask=inside, other=0.0)
    sum_E = tl.sum(sums_PE * tl.exp2(part_PE - largest_E[None, :]), 0)
    load_E = sum_E * tl.exp2(largest_E)
    settled = (bound > 0.0) & (tl.max(load_E, 0) * E <= bound * tl.sum(load_E, 0))
    offset_E = tl.load(offset_1E + e, mask=e < E, other=0.0)
    updated_E = offset_E - largest_E - tl.log2(tl.maximum(sum_E, 1e-37))
    return tl.where((parts > 0) & (e < E) & (settled == 0), updated_E, offset_E), settled


@triton.jit
def _load_tile(logits_TE, offset_E, t, T, e, temperature, E: tl.constexpr):
    """Load X of some tokens, with LOWEST for padding experts."""
    inside = (t[:, None] < T) & (e[None, :] < E)
    logits = tl.load(logits_TE + t[:, None].to(tl.int64) * E + e[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.where(e[None, :] < E, logits * (temperature * LOG2E) + offset_E[None, :], LOWEST)


@triton.jit
def _normalised(X_TE):
    X_TE -= tl.max(X_TE, 1)[:, None]
    return X_TE - tl.log2(tl.sum(tl.exp2(X_TE), 1))[:, None]


@triton.jit(do_not_specialize=["T", "iterations", "bound"])
def _find_offsets(
    logits_TE, found_E, T, iterations, temperature, bound,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """Run all iterations in one program; each tile entry has its own sums, so threads synchronise once per pass.

    After the first sums, some token of each expert contributes at least 1 / T of the expert's sum. An iteration
    changes the ratio of two experts by at most T * E. No later sum can therefore overflow or underflow in float32.
    """
    e = tl.arange(0, BLOCK_E)
    offset_E = tl.zeros((BLOCK_E,), tl.float32)
    largest_TE = tl.full((BLOCK_T, BLOCK_E), LOWEST, tl.float32)
    sums_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for first in range(0, T, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        X_TE = _load_tile(logits_TE, offset_E, t, T, e, temperature, E)
        if NORMALISE:
            X_TE = _normalised(X_TE)
        X_TE = tl.where(t[:, None] < T, X_TE, LOWEST)
        ratio_TE = tl.exp2(-tl.abs(X_TE - largest_TE))  # of the smaller one to the larger one
        sums_TE = tl.where(largest_TE < X_TE, sums_TE * ratio_TE + 1.0, sums_TE + ratio_TE)
        largest_TE = tl.maximum(largest_TE, X_TE)
    largest_E = tl.max(largest_TE, 0)
    offset_E = -largest_E - tl.log2(tl.sum(sums_TE * tl.exp2(largest_TE - largest_E[None, :]), 0))
    left = iterations
    bounded = iterations if NORMALISE else iterations - 1  # the first iteration is always done
    while left > 0:
        sums_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
        for first in range(0, T, BLOCK_T):
            t = first + tl.arange(0, BLOCK_T)
            X_TE = _load_tile(logits_TE, offset_E, t, T, e, temperature, E)
            share_TE = tl.exp2(X_TE - tl.max(X_TE, 1)[:, None])
            sums_TE += share_TE * tl.where(t < T, 1.0 / tl.sum(share_TE, 1), 0.0)[:, None]
        # In units of T / E, what a balanced expert has, or the offsets would sink without end.
        load_E = tl.where(e < E, tl.sum(sums_TE, 0) * (E / T), 1.0)
        settled = (tl.max(load_E, 0) <= bound) & (left <= bounded)
        offset_E = tl.where(settled, offset_E, offset_E - tl.log2(load_E))
        left = tl.where(settled, 0, left - 1)
    tl.store(found_E + e, offset_E, mask=e < E)


@triton.jit(do_not_specialize=["T", "parts", "bound"])
def _sum_columns(
    logits_TE, offset_1E, largest_PE, sums_PE, parts, bound, next_offset_1E, next_largest_PE, next_sums_PE,
    T, temperature,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """Leave each expert's sum of exp2(X) over this program's tokens, as a largest X and a sum relative to it."""
    e = tl.arange(0, BLOCK_E)
    offset_E, settled = _updated_offset(offset_1E, largest_PE, sums_PE, parts, bound, e, E, BLOCK_P)
    largest_E = tl.full((BLOCK_E,), LOWEST, tl.float32)
    sum_E = tl.zeros((BLOCK_E,), tl.float32)
    for first in range(tl.program_id(0) * BLOCK_T, tl.where(settled, 0, T), tl.num_programs(0) * BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        X_TE = _load_tile(logits_TE, offset_E, t, T, e, temperature, E)
        if NORMALISE:
            X_TE = _normalised(X_TE)
        X_TE = tl.where(t[:, None] < T, X_TE, LOWEST)
        grown_E = tl.maximum(largest_E, tl.max(X_TE, 0))
        added_TE = tl.where(t[:, None] < T, tl.exp2(X_TE - grown_E[None, :]), 0.0)
        sum_E = sum_E * tl.exp2(largest_E - grown_E) + tl.sum(added_TE, 0)
        largest_E = grown_E
    largest_E = tl.where(settled, 0.0, largest_E)  # equal sums: the next launch finds it settled too
    sum_E = tl.where(settled, 1.0, sum_E)
    tl.store(next_offset_1E + e, offset_E, mask=(e < E) & (tl.program_id(0) == 0))
    tl.store(next_largest_PE + tl.program_id(0) * E + e, largest_E, mask=e < E)
    tl.store(next_sums_PE + tl.program_id(0) * E + e, sum_E, mask=e < E)


@triton.jit(do_not_specialize=["T", "parts", "bound"])
def _choose(
    logits_TE, offset_1E, largest_PE, sums_PE, parts, bound, choice_T, tokens_E, T, temperature,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK_E)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offset_E, _ = _updated_offset(offset_1E, largest_PE, sums_PE, parts, bound, e, E, BLOCK_P)
    X_TE = _load_tile(logits_TE, offset_E, t, T, e, temperature, E)
    best_T = tl.argmax(X_TE, 1)
    tl.store(choice_T + t, best_T.to(tl.int64), mask=t < T)
    if COUNT:  # whole numbers: the order in which programs add them changes nothing
        is_best_TE = (best_T[:, None] == e[None, :]) & (t[:, None] < T)
        tl.atomic_add(tokens_E + e, tl.sum(is_best_TE.to(tl.int64), 0), mask=e < E)
