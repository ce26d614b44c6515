"""Recurrences and causal windows over sequences that are cut into contiguous parts, one for each rank of a group.

Over its part of a sequence, a linear recurrence is an affine map of the state that it starts with:

    end = decay * start + added

The decay is one number for each entry of the state, or for many, or a matrix for each head (`matmul` instead of `mul`).
A rank computes decay and added without its start. All ranks gather the two, and each chains the maps of the ranks
before it into its own start. The gradient of the state goes the other way. So ranks exchange the sizes of a state,
whatever the length of the sequence, and no activations. One gather takes the place of log2(ranks) dependent messages.

Shapes: G ranks of the group, part 0 first.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatron_blackmamba.ops.gradients import first_order

Inputs = TypeVar("Inputs", bound=tuple[Any, ...])
"""A NamedTuple: the arguments of an op."""
Summary = tuple[Tensor, Tensor]
"""decay and added."""
Applied = Callable[[Tensor, Tensor], Tensor]
"""Applies a decay to a state: torch.mul or torch.matmul."""


class Chain:
    """The parts of the same sequences on other ranks, as seen from one layer in one forward and backward pass."""

    def __init__(self, group: dist.ProcessGroup, applied: Applied = torch.mul) -> None:
        self.group, self.applied = group, applied

    def start(self, decay: Tensor, added: Tensor) -> Tensor:
        """Give what this part makes of its start, and return its start."""
        self.decays_G, added_G = gathered(decay, self.group), gathered(added, self.group)
        start = torch.zeros_like(added)
        for rank in range(self.group.rank()):
            start = self.applied(self.decays_G[rank], start) + added_G[rank]
        return start

    def grad_end(self, grad_start: Tensor, sequences: slice = slice(None)) -> Tensor:
        """Give the gradient of the start by this part's outputs alone. Return that of the end by the later parts."""
        grads_G = gathered(grad_start, self.group)
        grad_end = torch.zeros_like(grad_start)
        for rank in range(self.group.size() - 1, self.group.rank(), -1):
            decay = self.decays_G[rank][sequences]
            grad_end = grads_G[rank] + self.applied(decay.mT if self.applied is torch.matmul else decay, grad_end)
        return grad_end


def from_neighbour(x: Tensor, group: dist.ProcessGroup, distance: int) -> Tensor:
    """Return `x` of the rank `distance` parts ahead (behind if negative), or zeros outside the sequence."""
    x_G, rank = gathered(x, group), group.rank() + distance
    return x_G[rank].clone() if 0 <= rank < group.size() else torch.zeros_like(x)


def scan_part(
    scan: Callable[[Inputs, Tensor], tuple[Tensor, Tensor]],
    summarise: Callable[[Inputs], Summary],
    group: dist.ProcessGroup,
    inputs: Inputs,
    applied: Applied = torch.mul,
) -> Tensor:
    """Return the output of `scan` for this rank's part of the sequences.

    Each part is scanned twice: once for the state that the next ranks need, and once from the right initial state.
    The backward pass does the same.

    Args:
        scan: `scan(inputs, start)` returns the output and the final state; it must be differentiable.
        summarise: `summarise(inputs)` returns the decay of the part, and its final state from a zero state.
        applied: What a decay does to a state.
    """
    if torch.is_grad_enabled():
        return _ScanPart.apply(scan, summarise, Chain(group, applied), type(inputs), *inputs)
    return scan(inputs, Chain(group, applied).start(*summarise(inputs)))[0]


class _ScanPart(torch.autograd.Function):
    """The recurrence over one part, between parts whose states it needs, and which need its own."""

    @staticmethod
    def forward(ctx, scan, summarise, chain, kind, *arguments):
        leaves = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
        start = chain.start(*summarise(kind(*leaves)))
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[4:]) if needed]
        for i in wanted:
            leaves[i].requires_grad_()
        with torch.enable_grad():
            y, end = scan(kind(*leaves), start.requires_grad_())
        ctx.chain, ctx.wanted = chain, wanted
        ctx.graph = (leaves, start, get_gradient_edge(y), get_gradient_edge(end))
        return y.detach()

    @staticmethod
    @first_order
    def backward(ctx, grad_y):
        leaves, start, y, end = ctx.graph
        ctx.graph = None  # or the inputs would live until the whole backward pass is over
        (of_this_part,) = torch.autograd.grad(y, start, grad_y, retain_graph=True)
        grad_end = ctx.chain.grad_end(of_this_part)
        grads: list[Any] = [None] * len(leaves)
        found = torch.autograd.grad((y, end), [leaves[i] for i in ctx.wanted], (grad_y, grad_end))
        for i, grad in zip(ctx.wanted, found, strict=True):
            grads[i] = grad
        return None, None, None, None, *grads


def several(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a group that cuts something, or None: a group of one rank does not."""
    return group if group is not None and group.size() > 1 else None


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x` of all ranks, `[G, ...]`."""
    gathered_G = x.new_empty(group.size(), *x.shape)
    dist.all_gather(list(gathered_G.unbind()), x.contiguous(), group=group)
    return gathered_G


def from_next(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x` of the next part, zeros for the last; the gradient goes back to where it came from."""
    return _FromNext.apply(x, group)


class _FromNext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return from_neighbour(x, group, 1)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        return from_neighbour(grad, ctx.group, -1), None


def sum_before(x: Tensor, ended_B: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `x` `[B, ...]` over the parts before this one, and pass on its gradient.

    ended_B: True where a document begins in this part; then later parts get nothing from the ones before it.
    """
    reached_GB = torch.ones(group.size(), len(x), dtype=x.dtype, device=x.device)
    ended_GB = gathered(ended_B, group)
    for part in range(group.rank() - 2, -1, -1):
        reached_GB[part] = reached_GB[part + 1] * ~ended_GB[part + 1]
    onward_GB = torch.ones_like(reached_GB)
    for part in range(group.rank() + 2, group.size()):
        onward_GB[part] = onward_GB[part - 1] * ~ended_GB[part - 1]
    return _SumBefore.apply(x, reached_GB, onward_GB, group)


class _SumBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, reached_GB, onward_GB, group):
        ctx.onward_GB, ctx.group = onward_GB, group
        return _weighted(gathered(x, group), reached_GB, slice(0, group.rank()))

    @staticmethod
    @first_order
    def backward(ctx, grad):
        later = slice(ctx.group.rank() + 1, None)
        return _weighted(gathered(grad, ctx.group), ctx.onward_GB, later), None, None, None


def _weighted(x_GB: Tensor, weights_GB: Tensor, parts: slice) -> Tensor:
    weights = weights_GB[parts].view(*weights_GB[parts].shape, *[1] * (x_GB.dim() - 2))
    return (x_GB[parts] * weights).sum(0)
