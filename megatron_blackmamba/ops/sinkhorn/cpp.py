"""Sinkhorn routing in C++ (csrc/sinkhorn.cpp): a pass over the tokens for the start, each iteration and the choice.

Over a process group the ranks' sums, E numbers, are added here between the passes.

Shapes: T tokens, E experts.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_blackmamba.ops import library
from megatron_blackmamba.ops.backends import UP_TO_FP32, Takes
from megatron_blackmamba.ops.sinkhorn.inputs import Inputs

TAKES = Takes("cpu", UP_TO_FP32)
LOG2_E = 1.4426950408889634
MAX_EXPERTS = 1024  # as in csrc/sinkhorn.cpp


def unsupported(inputs: Inputs) -> str | None:
    experts = inputs.logits_TE.shape[1]
    return None if experts <= MAX_EXPERTS else f"up to {MAX_EXPERTS} experts, not {experts}"


def choice(inputs: Inputs, tokens_E: Tensor | None = None, bias_E: Tensor | None = None) -> Tensor:
    choice_T, offset_E = _run(inputs, tokens_E)
    if bias_E is not None:
        bias_E += offset_E / (inputs.temperature * LOG2_E)
    return choice_T


def bias(inputs: Inputs) -> Tensor:
    """Return what the plan adds to the logits of each expert, up to a constant."""
    return _run(inputs, None)[1] / (inputs.temperature * LOG2_E)


def _run(inputs: Inputs, tokens_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the choice of each token, and the offsets of the experts, of base 2."""
    logits_TE, iterations, temperature, start, group, bound = inputs
    T, E = logits_TE.shape
    choice_T = torch.empty(T, dtype=torch.int64)
    logits = logits_TE.float().contiguous()
    offset_E, largest_E, sum_E = logits.new_zeros(3, E).unbind()
    # The uniform start's first iteration is: normalise the tokens, then the experts. From there on both are alike.
    normalised = start == "uniform" and iterations > 0
    summed = normalised or start == "balanced"
    arguments = _Arguments(T=T, E=E, sum_columns=summed, normalise_rows=normalised, scale=temperature * LOG2_E)
    arguments.set(logits=logits, X=logits.new_empty(T + -T % 16, E))
    arguments.set(offset=offset_E, largest=largest_E, sum=sum_E, choice=choice_T, tokens=tokens_E)

    isa = library.isa()
    library.call("sinkhorn_load", arguments, isa)
    if group is not None and summed:
        here_E = largest_E.clone()
        dist.all_reduce(largest_E, op=dist.ReduceOp.MAX, group=group)
        sum_E *= torch.exp2(here_E - largest_E)
        dist.all_reduce(sum_E, group=group)
    left = iterations - normalised
    bounded = max(0, left - 2 + normalised) if bound else 0  # all but the start's and the first iteration's updates
    for arguments.bound, number in ((0.0, left - bounded), (bound, bounded)):
        for together in [number] if group is None else [1] * number:
            arguments.set(iterations=together)
            library.call("sinkhorn_iterate", arguments, isa)
            if group is not None:
                dist.all_reduce(sum_E, group=group)
    library.call("sinkhorn_choose", arguments, isa)
    return choice_T, offset_E


class _Arguments(library.Arguments):
    """struct Sinkhorn of csrc/sinkhorn.h."""

    _fields_ = library.fields(
        "int64 T E sum_columns normalise_rows iterations; float scale bound;"
        "pointer logits X offset largest sum choice tokens"
    )
