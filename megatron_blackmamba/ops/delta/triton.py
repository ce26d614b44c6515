"""The delta rule in Triton: states pass from chunk to chunk in one kernel, and chunks run in parallel in the others.

Numbers of any format are multiplied as fp32. Only the inputs and the states between segments are kept for the backward
pass, which computes the rest again. Sums over blocks of key channels are taken in a fixed order: there are no atomics.
What comes out lies in memory as its input does, [B, L] or [L, B].

Shapes: B batch, L length, N chunks, H heads, T and S tokens of a chunk, K key channels of a head, V value channels,
D decays of a head: 1 or K, X blocks of key channels.
"""

from itertools import chain

import torch
import triton
from torch import Tensor

from megatron_blackmamba.ops.backends import UP_TO_FP32, Takes
from megatron_blackmamba.ops.delta import triton_backward, triton_forward
from megatron_blackmamba.ops.delta.chunked import CHUNK, cut, segments
from megatron_blackmamba.ops.delta.inputs import Inputs
from megatron_blackmamba.ops.gradients import first_order
from megatron_blackmamba.ops.library import with_channels_contiguous
from megatron_blackmamba.ops.triton_support import GRID

LEVELS = CHUNK.bit_length() - 1
TAKES = Takes("cuda", UP_TO_FP32)
WIDEST = 128
"""Key channels of a head that the kernels take at most."""
BLOCK = 32
"""Key channels, or value channels, of a program."""


def unsupported(inputs: Inputs) -> str | None:
    B, _, H, K = inputs.k_BLHK.shape
    if K > WIDEST:
        return f"heads have at most {WIDEST} key channels, not {K}"
    if inputs.k_BLHK.numel() == 0 or inputs.written_BLHV.numel() == 0:
        return "the input is empty"
    blocks = triton.cdiv(max(K, inputs.written_BLHV.shape[3]), BLOCK)
    return f"at most {GRID:,} sequences, heads and blocks" if max(B, H * blocks) > GRID else None


def scan(inputs: Inputs) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _Scan.apply(*inputs)
    return found


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        inputs = Inputs(*arguments)
        state, ctx.starts = inputs.start().contiguous(), []
        y_BLHV = torch.empty_like(with_channels_contiguous(inputs.written_BLHV), dtype=inputs.q_BLHK.dtype)
        with torch.cuda.device_of(state):
            for part in segments(inputs):
                ctx.starts.append(state)
                state = _Segment(cut(inputs, part), state).outputs(y_BLHV[:, part])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arguments)
        return y_BLHV, state

    @staticmethod
    @first_order
    def backward(ctx, dy_BLHV, dstate_BHKV):
        inputs = Inputs(*ctx.saved_tensors)
        dy_BLHV = torch.zeros_like(inputs.written_BLHV) if dy_BLHV is None else with_channels_contiguous(dy_BLHV)
        dstate_BHKV = torch.zeros_like(ctx.starts[0]) if dstate_BHKV is None else dstate_BHKV.contiguous()
        grads = [torch.empty_like(with_channels_contiguous(x)) for x in inputs[:5]]
        for part, start in zip(reversed(segments(inputs)), reversed(ctx.starts), strict=True):
            segment = _Segment(cut(inputs, part), start)
            dstate_BHKV = segment.gradients(dy_BLHV[:, part], dstate_BHKV, *(x[:, part] for x in grads))
        first = inputs.initial_state_BHKV
        return *grads, None if first is None else dstate_BHKV.to(first.dtype), None


class _Segment:
    """Some chunks of all sequences: what they do to any state, and to the one before them."""

    def __init__(self, inputs: Inputs, start_BHKV: Tensor) -> None:
        self.tokens = [with_channels_contiguous(x) for x in inputs[:5]]
        q, *_, written, log_decay = self.tokens
        (self.batch, self.length, self.H, self.K), self.V, D = q.shape, written.shape[3], log_decay.shape[3]
        self.chunks = triton.cdiv(self.length, CHUNK)
        heads, keys, values = (self.batch, self.chunks, self.H), (CHUNK, self.K), (CHUNK, self.V)
        self.new = q.new_empty
        fp32 = {"dtype": torch.float32}
        self.inverse, self.read, left = self.new(3, *heads, CHUNK, CHUNK, **fp32).unbind()
        self.since, self.erased, self.kept, of_e = self.new(4, *heads, *keys, **fp32).unbind()
        own, self.changes = self.new(2, *heads, *values, **fp32).unbind()
        self.total, self.states = self.new(*heads, D, **fp32), self.new(*heads, self.K, self.V, **fp32)
        self.end = torch.empty_like(start_BHKV)
        self.sizes = {"H": self.H, "K": self.K, "V": self.V, "T": CHUNK}
        self.decays = {"D": D, "BY_CHANNEL": D > 1}
        self.block_k, self.block_v = (min(BLOCK, _block(size)) for size in (self.K, self.V))
        self.reset = q if inputs.reset_BL is None else inputs.reset_BL.contiguous().view(torch.uint8)
        self.each = {"LEVELS": LEVELS, "HAS_RESET": inputs.reset_BL is not None}
        q, k, erase, written, log_decay = self.tokens
        for x, met, since in ((erase, left, of_e), (q, self.read, self.since)):
            triton_forward.meet[(self.chunks, self.batch, self.H)](
                x, k, log_decay, self.reset, met, since, self.kept, self.total,
                self.length, *_strides(x, k, log_decay), self.chunks,
                H=self.H, K=self.K, T=CHUNK, **self.decays, **self.each, BLOCK_K=self.block_k, KEEP=x is q, num_warps=4,
            )  # fmt: skip
        triton_forward.solve[(self.chunks, self.batch, self.H)](
            left, of_e, written, self.inverse, self.erased, own, self.length, *_strides(written), self.chunks,
            **self.sizes, LEVELS=LEVELS, BLOCK_K=self.block_k, BLOCK_V=self.block_v, num_warps=4,
        )  # fmt: skip
        triton_forward.pass_states[(self.H * triton.cdiv(self.V, self.block_v), self.batch)](
            self.erased, self.kept, own, self.total, start_BHKV, self.states, self.changes, self.end, self.chunks,
            **self.sizes, **self.decays, BLOCK_K=_block(self.K), BLOCK_V=self.block_v, num_warps=4,
        )  # fmt: skip

    def outputs(self, y_BLHV: Tensor) -> Tensor:
        """Compute the outputs, and return the state behind the last token."""
        triton_forward.outputs[(self.chunks, self.batch, self.H * triton.cdiv(self.V, self.block_v))](
            self.read, self.since, self.states, self.changes, y_BLHV, self.length, *_strides(y_BLHV), self.chunks,
            **self.sizes, BLOCK_K=self.block_k, BLOCK_V=self.block_v, num_warps=4,
        )  # fmt: skip
        return self.end

    def gradients(
        self, dy: Tensor, dend: Tensor, dq: Tensor, dk: Tensor, derase: Tensor, dwritten: Tensor, ddecay: Tensor
    ) -> Tensor:
        """Compute the gradients of the inputs, and return that of the state before the first token."""
        q, k, erase, _, log_decay = self.tokens
        dstart, dends = torch.empty_like(self.end), torch.empty_like(self.states)
        dchanges, dsolved = torch.empty_like(self.changes), torch.empty_like(self.changes)
        dleft, dread = torch.empty_like(self.inverse), torch.empty_like(self.inverse)
        dy_at = (self.length, *_strides(dy))
        triton_backward.pass_gradients[(self.H * triton.cdiv(self.V, self.block_v), self.batch)](
            self.read, self.since, self.erased, self.kept, self.total, dy, dend, dends, dchanges, dstart, *dy_at,
            self.chunks, **self.sizes, **self.decays, BLOCK_K=_block(self.K), BLOCK_V=self.block_v, num_warps=4,
        )  # fmt: skip
        triton_backward.of_values[(self.chunks, self.batch, self.H)](
            self.inverse, self.changes, dchanges, dy, dsolved, dleft, dread, dwritten, *dy_at, *_strides(dwritten),
            self.chunks, H=self.H, V=self.V, T=CHUNK, BLOCK_V=self.block_v, num_warps=4,
        )  # fmt: skip
        blocks = triton.cdiv(self.K, self.block_k)
        dtotal = self.new(self.batch, self.chunks, self.H, self.K, dtype=torch.float32)
        triton_backward.of_states[(self.chunks, self.batch, self.H * blocks)](
            self.states, dends, self.changes, dsolved, dy, self.since, self.erased, self.kept, dtotal, *dy_at,
            self.chunks, **self.sizes, BLOCK_K=self.block_k, BLOCK_V=self.block_v, num_warps=4,
        )  # fmt: skip
        by_channel = self.decays["BY_CHANNEL"]
        dks = self.new(2, *dk.shape, dtype=torch.float32)
        ddecays = self.new(2, 1 if by_channel else blocks, *ddecay.shape, dtype=torch.float32)
        for x, dmet, since, dx, part in ((erase, dleft, self.erased, derase, 0), (q, dread, self.since, dq, 1)):
            triton_backward.of_met[(self.chunks, self.batch, self.H * blocks)](
                x, k, log_decay, self.reset, dmet, since, self.kept, dtotal, dx, dks[part], ddecays[part],
                self.length, *_strides(x, k, log_decay, dx, dks[part]), *ddecays[part].stride()[:4], self.chunks,
                H=self.H, K=self.K, T=CHUNK, **self.decays, **self.each, BLOCK_K=self.block_k, KEEP=x is q, num_warps=4,
            )  # fmt: skip
        dk.copy_(dks.sum(0))
        ddecay.copy_(ddecays.sum((0, 1)))
        return dstart


def _strides(*tensors: Tensor) -> list[int]:
    """Return the strides of sequences, tokens and heads."""
    return list(chain.from_iterable(x.stride()[:3] for x in tensors))


def _block(size: int) -> int:
    """Return the side of a tile, for products at least 16."""
    return max(16, triton.next_power_of_2(size))
