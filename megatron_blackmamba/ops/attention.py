"""Causal attention within documents, and over sequences that ranks share in parts.

A token sees its own document's tokens up to itself. Queries are taken in blocks. A block sees the keys from the start
of its first document on, so documents save work. Blocks have fewer queries over many keys, so no mask grows
with the sequence, and the backward pass builds it again. PyTorch's fused kernel computes each block.

Under context parallelism all ranks gather the keys and values, whose few heads are small beside the queries' scores. A
rank has a contiguous part of each sequence, since states pass between layers of Mamba that way. So the last rank does
the most: for G ranks, 2 - 1/G times the mean.

Shapes: B batch, L queries, S keys, H heads, G key-value heads (or ranks of a group), C channels of a head.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops.context import gathered
from megatron_blackmamba.ops.gradients import first_order

BLOCK = 512
"""Queries of a block, at most."""
MASK = 2**24
"""Entries of a mask, at most, as long as a block has several queries."""


class Documents(NamedTuple):
    """The beginnings of the documents of a micro-batch."""

    starts_BL: Tensor
    """Position in the whole sequence of the first token of each token's document."""
    lows: list[int]
    """The first key that each block of queries sees."""


def attention(
    q_BHLC: Tensor,
    k_BGLC: Tensor,
    v_BGLC: Tensor,
    documents: Documents | None = None,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    largest_H: Tensor | None = None,
) -> Tensor:
    """Return what each query finds, `[B, H, L, C]`.

    Args:
        documents: The documents that do not see each other (`documents_of`); None: all tokens are of one.
        group: Ranks with the other parts of these sequences, in order.
        scale: Factor of the scores; None: 1 / sqrt(C).
        largest_H: Raised to each head's largest score, which costs another product of queries and keys.
    """
    first = 0
    if group is not None:
        k_BGLC, v_BGLC = (_Joined.apply(x, group) for x in (k_BGLC, v_BGLC))
        first = group.rank() * q_BHLC.shape[2]
    if largest_H is not None:
        _raise(largest_H, q_BHLC, k_BGLC, documents or _one(q_BHLC, k_BGLC), first, scale)
    if group is None and documents is None:
        grouped = q_BHLC.shape[1] != k_BGLC.shape[1]
        return F.scaled_dot_product_attention(q_BHLC, k_BGLC, v_BGLC, is_causal=True, scale=scale, enable_gqa=grouped)
    return _Blocks.apply(q_BHLC, k_BGLC, v_BGLC, documents or _one(q_BHLC, k_BGLC), first, scale)


@torch.no_grad()
def attention_after(
    q_BHLC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    hidden_BS: Tensor,
    documents: Documents | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return what the last L of S tokens find, without gradients.

    hidden_BS: True at the tokens that no other token sees, such as padding.
    """
    first = k_BGSC.shape[2] - q_BHLC.shape[2]
    return _blocks(q_BHLC, k_BGSC, v_BGSC, documents or _one(q_BHLC, k_BGSC), first, scale, hidden_BS)


@torch.no_grad()
def _raise(
    largest_H: Tensor, q_BHLC: Tensor, k_BGSC: Tensor, documents: Documents, first: int, scale: float | None
) -> None:
    """Raise each head's number to its largest score, one head at a time, so that few scores are held at once."""
    heads_per_group, scale = q_BHLC.shape[1] // k_BGSC.shape[1], scale or q_BHLC.shape[3] ** -0.5
    for begin, end, low, high in _spans(documents, first, k_BGSC.shape[2]):
        visible_BLS = _visible(documents.starts_BL[:, begin:end], first + begin, low, high)[:, 0]
        for head, q_BLC in enumerate(q_BHLC[:, :, begin:end].unbind(1)):
            scores_BLS = q_BLC @ k_BGSC[:, head // heads_per_group, low:high].mT
            found = scores_BLS.masked_fill_(~visible_BLS, -torch.inf).amax() * scale
            largest_H[head] = torch.maximum(largest_H[head], found)


def _one(q_BHLC: Tensor, k_BGSC: Tensor) -> Documents:
    """Return that all tokens are of one document."""
    B, _, L, _ = q_BHLC.shape
    starts_BL = torch.zeros(B, L, dtype=torch.int64, device=q_BHLC.device)
    return Documents(starts_BL, [0] * -(-L // _queries(B, k_BGSC.shape[2])))


@torch.no_grad()
def documents_of(reset_BL: Tensor, group: dist.ProcessGroup | None = None, before: int = 0) -> Documents:
    """Return the documents of a micro-batch, for all layers: a GPU's host waits for them here.

    Args:
        reset_BL: True at the first token of a document, in this rank's part of each sequence if there is a group.
        before: Tokens of each sequence that were read before; without a group.
    """
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    B, L = reset_BL.shape
    first = before + rank * L
    here_L = torch.arange(first, first + L, device=reset_BL.device)
    starts_BL = torch.where(reset_BL, here_L, 0).cummax(1).values
    if group is not None:
        last_GB = gathered(starts_BL[:, -1], group)
        last_GB[rank:] = 0
        starts_BL = torch.maximum(starts_BL, last_GB.amax(0)[:, None])
    lows = starts_BL[:, :: _queries(B, before + ranks * L)].amin(0).tolist()  # later tokens begin later
    return Documents(starts_BL, lows)


class _Joined(torch.autograd.Function):
    """The parts of all ranks, one behind the other; a part's gradient is the sum of what all ranks found."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return torch.cat(gathered(x, group).unbind(), dim=2)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        parts = [part.contiguous() for part in grad.chunk(ctx.group.size(), dim=2)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return own, None


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, documents, first, scale):
        ctx.save_for_backward(q, k, v, documents.starts_BL)
        ctx.spans, ctx.scale = _spans(documents, first, k.shape[2]), scale
        return _blocks(q, k, v, documents, first, scale)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        q, k, v, starts = ctx.saved_tensors
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        for begin, end, low, high in ctx.spans:
            here, seen = slice(begin, end), slice(low, high)
            leaves = [x[:, :, part].detach().requires_grad_() for x, part in ((q, here), (k, seen), (v, seen))]
            with torch.enable_grad():
                y = _attend(*leaves, _visible(starts[:, here], high - (end - begin), low, high), ctx.scale)
            for total, part, found in zip(
                grads, (here, seen, seen), torch.autograd.grad(y, leaves, grad[:, :, here]), strict=True
            ):
                total[:, :, part] += found
        return *grads, None, None, None


def _blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    first: int,
    scale: float | None,
    hidden_BS: Tensor | None = None,
) -> Tensor:
    y = torch.empty_like(q)
    for begin, end, low, high in _spans(documents, first, k.shape[2]):
        visible = _visible(documents.starts_BL[:, begin:end], first + begin, low, high, hidden_BS)
        y[:, :, begin:end] = _attend(q[:, :, begin:end], k[:, :, low:high], v[:, :, low:high], visible, scale)
    return y


def _queries(B: int, keys: int) -> int:
    """Return the number of queries of a block."""
    return max(1, min(BLOCK, MASK // (B * keys)))


def _spans(documents: Documents, first: int, keys: int) -> list[tuple[int, int, int, int]]:
    """Return the first and last query of each block, and the first and last key that it sees."""
    B, L = documents.starts_BL.shape
    begins = range(0, L, _queries(B, keys))
    ends = [*begins[1:], L]
    return [(begin, end, low, first + end) for begin, end, low in zip(begins, ends, documents.lows, strict=True)]


def _visible(starts_BL: Tensor, position: int, low: int, high: int, hidden_BS: Tensor | None = None) -> Tensor:
    """Return which keys from low to high the queries from `position` on see, `[B, 1, L, S]`; at least themselves."""
    there_S = torch.arange(low, high, device=starts_BL.device)
    here_L = torch.arange(position, position + starts_BL.shape[1], device=starts_BL.device)
    seen_BLS = (there_S >= starts_BL[..., None]) & (there_S <= here_L[:, None])
    if hidden_BS is not None:
        seen_BLS = seen_BLS & ~hidden_BS[:, None, low:high] | (there_S == here_L[:, None])
    return seen_BLS[:, None]


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=grouped)
