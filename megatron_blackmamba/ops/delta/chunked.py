"""The delta rule as matrix products over chunks of tokens, in plain PyTorch on any device.

In a chunk, what token t changes in the state depends on what the earlier tokens changed:

    changed[t] + (sum over s < t of left[t, s] * changed[s]) = u[t] - (what the start still holds under e[t])

where left[t, s] is what is left of k[s] under e[t]. One triangular system a chunk gives all changes as a linear
function of the start. States then pass from chunk to chunk by two products, and outputs are products of their own.

Decays multiply. Their products between two tokens are exponentials of sums of logarithms of one sign, so nothing
overflows and small steps keep their digits after a large one. With a decay for each key channel, a product of two
matrices needs a token between the two: blocks of tokens double, and the older half meets the newer half at the border.

Only the inputs and the states between segments are saved for the backward pass, which runs each segment again.

Shapes: B batch, H heads, N chunks of a segment, C tokens of a chunk, T and S tokens of a block, K key channels,
V value channels, D decays of a head: 1 or K. X keys that meet the k of earlier tokens: e and q.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops.delta.inputs import Inputs
from megatron_blackmamba.ops.gradients import first_order

CHUNK = 64
NUMBERS = {"cpu": 2**21, "cuda": 2**26}
"""Numbers of all keys in a segment, if one chunk does not have more; autograd keeps about 30 times as many of it."""
NOTHING = -1000.0
"""A decay whose logarithm this is leaves nothing, in float64 too."""


def scan(inputs: Inputs) -> tuple[Tensor, Tensor]:
    return _Scan.apply(*inputs)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        inputs = Inputs(*arguments)
        state, written = inputs.start(), inputs.written_BLHV
        y_BLHV, ctx.starts = torch.empty_like(written, dtype=inputs.q_BLHK.dtype), []
        for part in segments(inputs):
            ctx.starts.append(state)
            y_BLHV[:, part], state = _segment(cut(inputs, part), state)
        ctx.save_for_backward(*arguments)
        return y_BLHV, state.clone() if not ctx.starts else state

    @staticmethod
    @first_order
    def backward(ctx, grad_y_BLHV, grad_state):
        inputs = Inputs(*ctx.saved_tensors)
        grads = [torch.empty_like(x) for x in inputs[:5]]
        for part, start in zip(reversed(segments(inputs)), reversed(ctx.starts), strict=True):
            tokens, start = cut(inputs, part), start.detach().requires_grad_()
            leaves = [x.detach().requires_grad_() for x in tokens[:5]]
            with torch.enable_grad():
                outputs = _segment(Inputs(*leaves, None, tokens.reset_BL), start)
            grad_state, *found = torch.autograd.grad(outputs, [start, *leaves], (grad_y_BLHV[:, part], grad_state))
            for whole, grad in zip(grads, found, strict=True):
                whole[:, part] = grad
            del outputs, found  # before the next segment
        first = inputs.initial_state_BHKV
        return *grads, None if first is None else grad_state.to(first.dtype), None


def segments(inputs: Inputs) -> list[slice]:
    B, L, H, K = inputs.k_BLHK.shape
    most = NUMBERS["cpu" if inputs.k_BLHK.is_cpu else "cuda"]
    tokens = CHUNK * max(1, most // max(1, B * H * K * CHUNK))
    return [slice(a, min(a + tokens, L)) for a in range(0, L, tokens)]


def cut(inputs: Inputs, part: slice) -> Inputs:
    q, k, erase, written, log_decay = (x[:, part] for x in inputs[:5])
    reset_BL = None if inputs.reset_BL is None else inputs.reset_BL[:, part]
    return Inputs(q, k, erase, written, log_decay, None, reset_BL)


def _segment(inputs: Inputs, state_BHKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a segment `[B, L, H, V]`, and the state behind it."""
    L, compute = inputs.k_BLHK.shape[1], state_BHKV.dtype
    C = min(CHUNK, 1 << (L - 1).bit_length())
    q, k, erase, written, log_decay = (_in_chunks(x.to(compute).transpose(1, 2), C) for x in inputs[:5])
    keys_BHNCXK = torch.stack((erase, q), dim=4)
    left_BHNCXC, since_start, until_end = _left(keys_BHNCXK, k, log_decay)
    if inputs.reset_BL is not None:
        document = _in_chunks(inputs.reset_BL, C).cumsum(2)[:, None]
        left_BHNCXC = left_BHNCXC * (document[..., None] == document[..., None, :]).unsqueeze(4)
        since_start = since_start * (document == 0)[..., None]
        until_end = until_end * (document == document[..., -1:])[..., None]
    to_changes_BHNCC, to_outputs_BHNCC = left_BHNCXC.unbind(4)
    erase, q = (keys_BHNCXK * since_start[..., None, :]).unbind(4)
    k_BHNKC, of_chunk_BHNK1 = (k * until_end).mT, since_start[..., -1, :, None]

    both = torch.cat((written, erase), dim=-1)
    solved = torch.linalg.solve_triangular(to_changes_BHNCC, both, upper=False, unitriangular=True)
    own, of_start = solved.split((written.shape[-1], erase.shape[-1]), dim=-1)
    starts, changes = [], []
    of_chunks = (x.unbind(2) for x in (own, of_start, k_BHNKC, of_chunk_BHNK1))  # once: a slice has a whole gradient
    for own_BHCV, of_start_BHCK, k_BHKC, of_chunk_BHK1 in zip(*of_chunks, strict=True):
        starts.append(state_BHKV)
        changes.append(own_BHCV - of_start_BHCK @ state_BHKV)
        state_BHKV = of_chunk_BHK1 * state_BHKV + k_BHKC @ changes[-1]
    y_BHNCV = q @ torch.stack(starts, dim=2) + to_outputs_BHNCC @ torch.stack(changes, dim=2)
    y_BLHV = y_BHNCV.flatten(2, 3)[:, :, :L].transpose(1, 2)
    return y_BLHV.to(inputs.q_BLHK.dtype), state_BHKV


def _in_chunks(x: Tensor, C: int) -> Tensor:
    """Return `[B, H, L, ...]` or `[B, L]` in chunks.

    Tokens are added to fill the last one: zeros, which neither decay nor write, in the last document.
    """
    dim = min(2, x.dim() - 1)
    missing = -x.shape[dim] % C
    padded = F.pad(x, (*[0] * (2 * (x.dim() - 1 - dim)), 0, missing)) if missing else x
    return padded.unflatten(dim, (-1, C))


def _left(keys_BHNCXK: Tensor, k_BHNCK: Tensor, log_decay_BHNCD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is left of k of token S under the keys of token T, and decays since a chunk's start and to its end.

    The first is `[B, H, N, C, X, C]`, 0 above the diagonal. The others are `[B, H, N, C, D]`: since the start with the
    token's own decay, to the end without it. J blocks of T tokens double until one is left.
    """
    since = log_decay_BHNCD.clamp(min=NOTHING)[..., None, :]  # [B, H, N, J, T, D], sums of logarithms
    until = torch.zeros_like(since)
    keys, k = keys_BHNCXK.unsqueeze(4), k_BHNCK.unsqueeze(4)  # [B, H, N, J, T, X, K] and [B, H, N, J, T, K]
    by_channel = log_decay_BHNCD.shape[-1] > 1
    own = (keys * k[..., None, :]).sum(-1) if by_channel else torch.ones_like(since)
    left = own[..., None]  # [B, H, N, J, T, X, S]
    while since.shape[3] > 1:
        (since_older, since_newer), (until_older, until_newer) = _halves(since), _halves(until)
        decay_T, decay_S = since_newer.exp(), until_older.exp()
        if by_channel:
            met = (_halves(keys)[1] * decay_T[..., None, :]).flatten(4, 5) @ (_halves(k)[0] * decay_S).mT
            met = met.unflatten(4, (-1, keys.shape[5]))
        else:
            met = (decay_T * decay_S.mT)[..., None, :]
        older, newer = _halves(left)
        left = torch.cat((F.pad(older, (0, older.shape[-1])), torch.cat((met, newer), dim=-1)), dim=4)
        since = torch.cat((since_older, since_newer + since_older[..., -1:, :]), dim=4)
        until = torch.cat((until_older + since_newer[..., -1:, :], until_newer), dim=4)
        keys, k = (x.flatten(3, 4).unflatten(3, (-1, 2 * x.shape[4])) for x in (keys, k))
    left = left[:, :, :, 0]
    if not by_channel:
        left = left * (keys_BHNCXK.flatten(3, 4) @ k_BHNCK.mT).unflatten(3, (-1, keys.shape[5]))
    return left, since[:, :, :, 0].exp(), until[:, :, :, 0].exp()


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the older and the newer of each pair of blocks, for blocks in dimension 3."""
    return x[:, :, :, 0::2], x[:, :, :, 1::2]
