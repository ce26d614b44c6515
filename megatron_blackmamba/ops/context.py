"""Recurrences and causal windows over sequences that are cut into contiguous parts, one for each rank of a group.

Over its part of a sequence, a recurrence whose decay is diagonal is an affine map of the state that it starts with:

    end = decay * start + added

A rank computes decay and added with a start of zero, all ranks gather the two, and each chains those of the ranks
before it into its own start. The gradient of the state goes the other way. So ranks exchange the sizes of a state,
whatever the length of the sequence, and no activations. One gather takes the place of log2(ranks) dependent messages.

Shapes: G ranks of the group, part 0 first.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Summary = tuple[Tensor, Tensor]
"""decay and added; the decay may be one number for many entries of the state."""


def from_previous_part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x` of the rank with the part before, zeros for the first part; gradients go back to where x came from."""
    received: Tensor = _FromPreviousPart.apply(x, group)
    return received


def scan_part(
    scan: Callable[..., tuple[Tensor, Tensor]],
    summarise: Callable[..., Summary],
    group: dist.ProcessGroup,
    *inputs: Tensor | None,
) -> Tensor:
    """Return what `scan` puts out for this rank's part of the sequences.

    scan(*inputs, start) returns the output and the state at the end, and gives gradients to all it is given.
    summarise(*inputs) returns the part's decay, and its end from a start of zero.
    """
    if torch.is_grad_enabled():
        y: Tensor = _ScanPart.apply(scan, summarise, group, *inputs)
        return y
    return scan(*inputs, _start(summarise(*inputs), group)[0])[0]


class _FromPreviousPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _neighbours(x, group, -1)

    @staticmethod
    def backward(ctx, grad):
        return _neighbours(grad, ctx.group, 1), None


class _ScanPart(torch.autograd.Function):
    """The recurrence over one part, between parts whose states it needs, and which need its own."""

    @staticmethod
    def forward(ctx, scan, summarise, group, *inputs):
        inputs = [None if x is None else x.detach() for x in inputs]
        start, decays_G = _start(summarise(*inputs), group)
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        for i in wanted:
            inputs[i].requires_grad_()
        with torch.enable_grad():
            y, end = scan(*inputs, start.requires_grad_())
        ctx.group, ctx.wanted = group, wanted
        ctx.graph = (decays_G, inputs, start, y, end)
        return y.detach()

    @staticmethod
    def backward(ctx, grad_y):
        group, (decays_G, inputs, start, y, end) = ctx.group, ctx.graph
        ctx.graph = None  # or the activations would live until the whole backward pass is over
        (of_this_part,) = torch.autograd.grad(y, start, grad_y, retain_graph=True)
        parts_G = _gathered(of_this_part, group)
        grad_end = torch.zeros_like(end)
        for rank in range(group.size() - 1, group.rank(), -1):
            grad_end = parts_G[rank] + decays_G[rank] * grad_end
        grads: list[Any] = [None] * len(inputs)
        found = torch.autograd.grad((y, end), [inputs[i] for i in ctx.wanted], (grad_y, grad_end))
        for i, grad in zip(ctx.wanted, found, strict=True):
            grads[i] = grad
        return None, None, None, *grads


def _start(summary: Summary, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the state that this part starts with, and the decays of all parts."""
    decays_G, added_G = (_gathered(x, group) for x in summary)
    start = torch.zeros_like(summary[1])
    for rank in range(group.rank()):
        start = decays_G[rank] * start + added_G[rank]
    return start, decays_G


def _neighbours(x: Tensor, group: dist.ProcessGroup, distance: int) -> Tensor:
    """Return `x` of the rank so far behind this one; where there is none, zeros."""
    gathered_G, rank = _gathered(x, group), group.rank() + distance
    return gathered_G[rank].clone() if 0 <= rank < group.size() else torch.zeros_like(gathered_G[0])


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered_G = x.new_empty(group.size(), *x.shape)
    dist.all_gather(list(gathered_G.unbind()), x.contiguous(), group=group)
    return gathered_G
