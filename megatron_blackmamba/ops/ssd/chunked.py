"""The SSD scan as matrix products over chunks of tokens, in plain PyTorch on any device.

Inside a chunk, the outputs are a product with a causal matrix of decays. The states before the chunks are a product
with the decays of whole chunks. A decay is the exponential of a sum of steps over some tokens (`_sums_between`). Only
sums <= 0 are exponentiated, so nothing overflows. Products are in fp32, even for bf16 activations: the gradient of A is
a difference of large sums, and bf16 products shift it by several percent.

Only the inputs are saved for the backward pass. It recomputes the states between segments, then runs the segments from
last to first, each forward and backward by autograd. Memory grows with the segment, not with the sequence.

Shapes: B batch, L length, H heads, P channels of a head, G groups, E heads of a group, F = E * P, N state.
K chunks of a segment, J = K + 1, T and S tokens of a chunk, U and V rows: R for each token (1 but for Mamba-3).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops.gradients import first_order
from megatron_blackmamba.ops.library import empty_like_rows
from megatron_blackmamba.ops.ssd.inputs import Inputs, Terms

CHUNK = 64
DECAYS = {"cpu": 2**18, "cuda": 2**24}
"""Decays of a segment, if one chunk does not have more: they stay in a CPU's cache, and occupy a GPU."""

Segment = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
"""Returns the outputs of a segment and the state behind it, given its inputs and the state before it."""


def scan(inputs: Any, segment: Segment | None = None) -> tuple[Tensor, Tensor]:
    """Scan the inputs of `ssd` or of Mamba-3, with another function for the segments if given."""
    return _Scan.apply(segment or _segment, type(inputs), *inputs)


@torch.no_grad()
def final_state(inputs: Inputs) -> Tensor:
    """Return the state behind the last token, at a part of the cost of a scan."""
    state = _start(inputs)
    for part in _segments(inputs):
        state = _states(_chunks(_cut(inputs, part), state.dtype, outputs=False), state)[1]
    return state


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, segment, kind, *inputs):
        ctx.segment, ctx.kind = segment, kind
        ctx.save_for_backward(*inputs)
        inputs = kind(*inputs)
        x_BLI, R, state = inputs.x_BLHP.flatten(2), inputs.rows, _start(inputs)
        y_BLI = empty_like_rows(x_BLI) if R == 1 else x_BLI.new_empty(*x_BLI.shape[:2], R * x_BLI.shape[2])
        parts, heads = _segments(inputs), inputs.x_BLHP.shape[2:]
        for part in parts:
            y, state = segment(_cut(inputs, part), state)
            y_BLI[:, part] = y.flatten(2)
        return y_BLI.unflatten(2, heads if R == 1 else (R, *heads)), state if parts else state.clone()

    @staticmethod
    @first_order
    def backward(ctx, grad_y_BLHP, grad_state_BHPN):
        inputs = ctx.kind(*ctx.saved_tensors)
        parts = _segments(inputs)
        starts = [_start(inputs)][: len(parts)]  # of no tokens there is no segment
        for part in parts[:-1]:
            at = _chunks(_cut(inputs, part), starts[-1].dtype, outputs=False)
            starts.append(_states(at, starts[-1])[1])
        grads = {name: torch.zeros_like(x) for name, x in inputs._asdict().items() if _has_gradient(x)}
        for part, start in zip(reversed(parts), reversed(starts), strict=True):
            grads_of_outputs = grad_y_BLHP[:, part], grad_state_BHPN
            found, grad_state_BHPN = _gradients(ctx.segment, _cut(inputs, part), start, grads_of_outputs)
            for name, grad in found.items():
                if _per_token(name):
                    grads[name][:, part] = grad
                else:
                    grads[name] += grad
            del found  # before the next segment
        if inputs.initial_state_BHPN is not None:
            grads["initial_state_BHPN"] = grad_state_BHPN.to(inputs.initial_state_BHPN.dtype)
        return None, None, *(grads.get(name) for name in inputs._fields)


def _gradients(
    segment: Segment, inputs: Inputs, start: Tensor, grads_of_outputs: tuple[Tensor, Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradients of a segment's inputs, and of the state before it; nothing else of the segment stays."""
    leaves: dict[str, Any] = {name: _leaf(x) for name, x in inputs._asdict().items()}
    start = start.detach().requires_grad_()
    with torch.enable_grad():
        outputs = segment(type(inputs)(**leaves), start)
    wanted = {name: x for name, x in leaves.items() if _has_gradient(x)}
    grad_start, *found = torch.autograd.grad(outputs, [start, *wanted.values()], grads_of_outputs)
    return dict(zip(wanted, found, strict=True)), grad_start.clone()  # a view of the gradients of all chunks


def _has_gradient(x: Tensor | None) -> bool:
    return x is not None and x.is_floating_point()


def _leaf(x: Tensor | None) -> Tensor | None:
    return x.detach().requires_grad_() if x is not None and x.is_floating_point() else x


def _per_token(name: str) -> bool:
    """Return whether a field of inputs has an entry for each token; its name ends with its shape."""
    return name.rpartition("_")[2].startswith("BL")


def _start(inputs: Inputs) -> Tensor:
    x = inputs.x_BLHP
    compute = torch.promote_types(x.dtype, torch.float32)
    if inputs.initial_state_BHPN is not None:
        return inputs.initial_state_BHPN.to(compute)
    return x.new_zeros(x.shape[0], *x.shape[2:], inputs.state_size, dtype=compute)


def _segments(inputs: Inputs) -> list[slice]:
    """Return the segments: whole chunks, then the chunk of the tokens that remain."""
    B, L, H, _ = inputs.x_BLHP.shape
    chunks, T = max(1, DECAYS["cuda" if inputs.x_BLHP.is_cuda else "cpu"] // (B * H * CHUNK**2)), _length(inputs)
    whole = L - L % T
    starts = [*range(0, whole, chunks * T), whole]
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], L], strict=True) if a < b]


def _length(inputs: Inputs) -> int:
    """Return the tokens of a chunk: CHUNK rows."""
    return max(1, CHUNK // inputs.rows)


def _cut(inputs: Inputs, part: slice) -> Inputs:
    """Return the inputs of a segment; the state before it goes beside them."""
    cut: Any = {name: x if x is None else x[:, part] for name, x in inputs._asdict().items() if _per_token(name)}
    return inputs._replace(**cut, initial_state_BHPN=None)


class _Chunks(NamedTuple):
    """The terms of a segment, and its documents."""

    terms: Terms
    steps_BKHT: Tensor
    document_BKT: Tensor | None
    """Number of resets from the start of the chunk up to each token."""

    def each_row(self, x_BKHT: Tensor) -> Tensor:
        """Return numbers of tokens for each row, `[B, K, U, H, 1]`."""
        R = self.terms.x_BKUHP.shape[2] // x_BKHT.shape[3]
        x_BKHU = x_BKHT if R == 1 else x_BKHT.repeat_interleave(R, dim=3)
        return x_BKHU.transpose(2, 3)[..., None]


def _chunks(inputs: Inputs, compute: torch.dtype, outputs: bool) -> _Chunks:
    """Cut a segment into chunks."""
    inputs = in_chunks(inputs, min(_length(inputs), inputs.x_BLHP.shape[1]))
    terms = inputs.terms(compute, outputs)
    document_BKT = None if inputs.reset_BL is None else inputs.reset_BL.cumsum(dim=2)
    return _Chunks(terms, terms.steps_BKTH.transpose(2, 3), document_BKT)


def in_chunks(inputs: Any, T: int) -> Any:
    """Return inputs with chunks of T tokens, `[B, K, T, ...]`."""
    fields = {name: x for name, x in inputs._asdict().items() if _per_token(name)}
    return inputs._replace(**{name: x if x is None else x.unflatten(1, (-1, T)) for name, x in fields.items()})


def _segment(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a segment `[B, L, H, P]`, or `[B, L, R, H, P]`, and the state behind it."""
    at, R = _chunks(inputs, state.dtype, outputs=True), inputs.rows
    terms, C_BKGUN, groups = at.terms, at.terms.C_BKGUN, at.terms.B_BKGUN.shape[2]
    assert C_BKGUN is not None

    # Inside each chunk.
    scores_BKGUV = C_BKGUN @ terms.B_BKGUN.mT
    decays_BKGEUV = _each_pair(_decays(at.steps_BKHT, at.document_BKT), R).unflatten(2, (groups, -1))
    x_BKGEVP = terms.x_BKUHP.transpose(2, 3).unflatten(2, (groups, -1))
    y_BKUHP = ((scores_BKGUV[:, :, :, None] * decays_BKGEUV) @ x_BKGEVP).flatten(2, 3).transpose(2, 3)

    # From the states before each chunk.
    starts_BKHPN, end_BHPN = _states(at, state)
    found_BKGUF = C_BKGUN @ starts_BKHPN.unflatten(2, (groups, -1)).flatten(3, 4).mT
    since_start_BKHT = at.steps_BKHT.cumsum(-1).exp()
    if at.document_BKT is not None:
        since_start_BKHT = since_start_BKHT * (at.document_BKT == 0)[:, :, None]
    found_BKUHP = found_BKGUF.transpose(2, 3).reshape(y_BKUHP.shape)
    y_BKUHP = torch.addcmul(y_BKUHP, found_BKUHP, at.each_row(since_start_BKHT))
    if terms.skip_H is not None:
        of_tokens = scores_BKGUV.unflatten(4, (-1, R)).unflatten(3, (-1, R)).diagonal(dim1=3, dim2=5)
        y_BKUHP = with_own_token(y_BKUHP, of_tokens.movedim(-1, 3), terms)
    y_BLHP = y_BKUHP.flatten(1, 2).to(inputs.x_BLHP.dtype)
    return y_BLHP if R == 1 else y_BLHP.unflatten(1, (-1, R)), end_BHPN


def _each_pair(x_HTS: Tensor, R: int) -> Tensor:
    """Return numbers of pairs of tokens for each pair of their rows, `[..., H, U, V]`."""
    return x_HTS if R == 1 else x_HTS.repeat_interleave(R, dim=-2).repeat_interleave(R, dim=-1)


def with_own_token(y_BKUHP: Tensor, scores_BKGTRR: Tensor, terms: Terms) -> Tensor:
    """Add to outputs what their own token's input contributes besides the state, given its scores."""
    input_BKUHP, less_BKHT, skip_H = terms.input_BKUHP, terms.less_BKHT, terms.skip_H
    assert input_BKUHP is not None and skip_H is not None
    if less_BKHT is None:
        return torch.addcmul(y_BKUHP, input_BKUHP, skip_H[:, None])
    less_BKHTRR, R = less_BKHT[..., None, None] * scores_BKGTRR, scores_BKGTRR.shape[-1]
    if R == 1:
        return torch.addcmul(y_BKUHP, input_BKUHP, skip_H[:, None] - less_BKHTRR[..., 0].transpose(2, 3))
    less_BKHUP = (less_BKHTRR @ input_BKUHP.transpose(2, 3).unflatten(3, (-1, R))).flatten(3, 4)
    return torch.addcmul(y_BKUHP, input_BKUHP, skip_H[:, None]) - less_BKHUP.transpose(2, 3)


def _decays(steps_HT: Tensor, document_T: Tensor | None) -> Tensor:
    """Return how much of step S is left at step T, `[..., H, T, S]`: nothing of later steps and of other documents."""
    T = steps_HT.shape[-1]
    hidden = torch.ones(T, T, dtype=torch.bool, device=steps_HT.device).triu(1)
    if document_T is not None:
        hidden = hidden | (document_T[..., None] != document_T[..., None, :])
    sums = _sums_between(steps_HT, None if document_T is None else hidden)
    return sums.masked_fill_(hidden.unsqueeze(-3), -torch.inf).exp_()


def _sums_between(steps_HT: Tensor, hidden_TT: Tensor | None) -> Tensor:
    """Return the sum of the steps after S up to T, `[..., H, T, S]`; where S is hidden from T, any finite number.

    In fp32, the difference of two running sums would be wrong: after one large step, small ones have no digits left.
    A GPU, which is slow in float64, starts a running sum at each S. For a CPU, differences in float64 are faster.
    """
    return _sums_from_each(steps_HT) if steps_HT.is_cuda else _differences_of_sums(steps_HT, hidden_TT)


def _sums_from_each(steps_HT: Tensor, *_: object) -> Tensor:
    return steps_HT[..., None].expand(*steps_HT.shape, steps_HT.shape[-1]).tril(-1).cumsum(-2)


def _differences_of_sums(steps_HT: Tensor, hidden_TT: Tensor | None) -> Tensor:
    """Return them as differences; a document's sum starts with it, or its rounding would depend on the ones before."""
    exact_HT = steps_HT.double()
    sums_HT = exact_HT.cumsum(-1) if hidden_TT is None else exact_HT @ (~hidden_TT).mT.double()
    return (sums_HT[..., None] - sums_HT[..., None, :]).to(steps_HT.dtype)


def _states(at: _Chunks, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk of a segment, and the one behind the last, given the one before the first."""
    x_BKUHP, B_BKGUN = at.terms.x_BKUHP, at.terms.B_BKGUN
    from_here_BKHT = at.steps_BKHT.flip(-1).cumsum(-1).flip(-1)
    until_end_BKHT = F.pad(from_here_BKHT[..., 1:], (0, 1)).exp()
    if at.document_BKT is not None:
        until_end_BKHT = until_end_BKHT * (at.document_BKT == at.document_BKT[..., -1:])[:, :, None]
    left_BKUHP = x_BKUHP * at.each_row(until_end_BKHT)
    left_BKGUF = left_BKUHP.unflatten(3, (B_BKGUN.shape[2], -1)).flatten(4, 5).transpose(2, 3)
    added_BKHPN = (left_BKGUF.mT @ B_BKGUN).reshape(*x_BKUHP.shape[:2], *state.shape[1:])

    # The state before the segment counts as what a chunk before the first one adds.
    of_chunk_BHJ = F.pad(from_here_BKHT[..., 0].mT, (1, 0))
    document_BJ = None if at.document_BKT is None else F.pad(at.document_BKT[..., -1].cumsum(-1), (1, 0))
    decays_BHJJ = _decays(of_chunk_BHJ, document_BJ)
    if added_BKHPN.shape[1] == 1:  # as on CPUs: nothing is copied
        return state[:, None], torch.addcmul(added_BKHPN[:, 0], state, decays_BHJJ[..., 1:, :1])
    added_BJHPN = torch.cat((state[:, None], added_BKHPN), dim=1)
    states_BHJF = decays_BHJJ @ added_BJHPN.transpose(1, 2).flatten(3)
    states_BJHPN = states_BHJF.unflatten(3, state.shape[2:]).transpose(1, 2)
    return states_BJHPN[:, :-1], states_BJHPN[:, -1].clone()  # a view would keep the states of all chunks
