"""The delta rule in Triton: states pass from chunk to chunk in one kernel, and chunks run in parallel in the others.

Numbers of any format are multiplied as fp32. Only the inputs and the states between segments are kept for the backward
pass, which computes the rest again. Parts of gradients are added up in a fixed order: there are no atomics. What comes
out lies in memory as its input does, [B, L] or [L, B].

Shapes: B batch, L length, N chunks, H heads, T and S tokens of a chunk, K key channels of a head, V value channels,
D decays of a head: 1 or K.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megatron_blackmamba.ops.backends import UP_TO_FP32, Takes, interpreted
from megatron_blackmamba.ops.delta import triton_backward, triton_forward
from megatron_blackmamba.ops.delta.chunked import CHUNK, cut, segments
from megatron_blackmamba.ops.delta.costs import WIDEST
from megatron_blackmamba.ops.delta.inputs import Inputs
from megatron_blackmamba.ops.gradients import first_order
from megatron_blackmamba.ops.library import with_channels_contiguous
from megatron_blackmamba.ops.triton_support import GRID, older_than

TAKES = Takes("cuda", UP_TO_FP32)
LEVELS = CHUNK.bit_length() - 1
BLOCK, NARROW = 32, 16
"""Channels of a tile; and key channels of one beside which a program holds decays of each channel."""


def unavailable() -> str | None:
    """Return why it is not used here: Triton 3.5 fails to compile `meet` for one decay a head."""
    return None if interpreted() else older_than((3, 6))


def unsupported(inputs: Inputs) -> str | None:
    (B, _, H, K), V = inputs.k_BLHK.shape, inputs.written_BLHV.shape[3]
    if K > WIDEST:
        return f"heads have at most {WIDEST} key channels, not {K}"
    if inputs.k_BLHK.numel() == 0 or V == 0:
        return "the input is empty"
    programs = max(B, H * triton.cdiv(K, NARROW), H * triton.cdiv(V, NARROW))
    return f"at most {GRID:,} sequences, or blocks of {NARROW} channels" if programs > GRID else None


def scan(inputs: Inputs) -> tuple[Tensor, Tensor]:
    return _Scan.apply(*inputs)


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
            dstate_BHKV = segment.gradients(dy_BLHV[:, part], dstate_BHKV, _Tokens(*(x[:, part] for x in grads)))
        first = inputs.initial_state_BHKV
        return *grads, None if first is None else dstate_BHKV.to(first.dtype), None


class _Tokens(NamedTuple):
    """Tokens of a segment, or their gradients."""

    q: Tensor
    k: Tensor
    erase: Tensor
    written: Tensor
    log_decay: Tensor


class _Segment:
    """Some chunks of all sequences, with what they do to the states before them."""

    def __init__(self, inputs: Inputs, start_BHKV: Tensor) -> None:
        self.tokens = _Tokens(*(with_channels_contiguous(x) for x in inputs[:5]))
        q, k, erase, written, log_decay = self.tokens
        (B, self.L, H, K), V, D = q.shape, written.shape[3], log_decay.shape[3]
        self.chunks = triton.cdiv(self.L, CHUNK)
        self.each, self.by_channel = (B, self.chunks, H), D > 1
        self.sizes = {"H": H, "T": CHUNK}
        block_k, block_v = (min(BLOCK, _block(size)) for size in (K, V))
        self.keys, self.values = {"K": K, "BLOCK_K": block_k}, {"V": V, "BLOCK_V": block_v}
        self.blocks_k, self.blocks_v = triton.cdiv(K, block_k), triton.cdiv(V, block_v)
        self.half_keys = self.keys | {"BLOCK_K": min(WIDEST // 2, _block(K))}
        self.narrow_keys = self.keys | {"BLOCK_K": NARROW if self.by_channel else block_k}
        self.decays = {"D": D, "BY_CHANNEL": self.by_channel}
        self.reset = q if inputs.reset_BL is None else inputs.reset_BL.contiguous().view(torch.uint8)
        self.resets = {"HAS_RESET": inputs.reset_BL is not None}

        self.since, of_e, self.kept, self.erased = self.tiles(4, K)
        left, self.read, self.inverse = self.tiles(3, CHUNK)
        own, self.changes = self.tiles(2, V)
        self.total, self.states = self.new(*self.each, D), self.new(*self.each, K, V)
        self.end_BHKV = torch.empty_like(start_BHKV)
        self.launch(
            triton_forward.weigh, self.blocks_k, q, k, erase, log_decay, self.reset, self.since, of_e, self.kept,
            self.total, self.L, *_strides(q, k, erase, log_decay), **self.keys, **self.decays, **self.resets,
        )  # fmt: skip
        for x, met in ((erase, left), (q, self.read)):
            self.launch(
                triton_forward.meet, 1, x, k, log_decay, self.reset, met, self.L, *_strides(x, k, log_decay),
                **self.narrow_keys, **self.decays, **self.resets, LEVELS=LEVELS,
            )  # fmt: skip
        self.launch(
            triton_forward.solve, 1, left, of_e, written, self.inverse, self.erased, own, self.L, *_strides(written),
            **self.keys, **self.values, LEVELS=LEVELS,
        )  # fmt: skip
        self.walk(
            triton_forward.carry_states, block_v, self.erased, self.kept, own, self.total, start_BHKV, self.states,
            self.changes, self.end_BHKV,
        )  # fmt: skip

    def outputs(self, y_BLHV: Tensor) -> Tensor:
        """Compute the outputs, and return the state behind the last token."""
        self.launch(
            triton_forward.read_outputs, self.blocks_v, self.read, self.since, self.states, self.changes, y_BLHV,
            self.L, *_strides(y_BLHV), **self.keys, **self.values,
        )  # fmt: skip
        return self.end_BHKV

    def gradients(self, dy: Tensor, dend_BHKV: Tensor, grads: _Tokens) -> Tensor:
        """Compute the gradients of the tokens, and return that of the state before the first."""
        (q, k, erase, _, log_decay), K, V = self.tokens, self.keys["K"], self.values["V"]
        dstart_BHKV, dends = torch.empty_like(dend_BHKV), torch.empty_like(self.states)
        own, dchanges, dsolved = self.tiles(3, V)
        dleft, dread = self.tiles(2, CHUNK)
        self.launch(
            triton_backward.of_outputs, self.blocks_v, self.read, dy, own, self.L, *_strides(dy), **self.values,
        )  # fmt: skip
        self.walk(
            triton_backward.carry_gradients, NARROW, self.since, self.erased, self.kept, own, self.total, dy, dend_BHKV,
            dends, dchanges, dstart_BHKV, self.L, *_strides(dy),
        )  # fmt: skip
        self.launch(
            triton_backward.of_values, 1, self.inverse, self.changes, dchanges, dy, dsolved, dleft, dread,
            grads.written, self.L, *_strides(dy, grads.written), **self.values,
        )  # fmt: skip

        dq, de = self.tiles(2, K)
        dks = self.new(3, *k.shape)
        ddecays = self.new(3, 1 if self.by_channel else self.blocks_k, *log_decay.shape)
        self.launch(
            triton_backward.of_states, self.blocks_k, q, k, erase, log_decay, self.reset, self.states, dends,
            self.changes, dsolved, dy, dq, de, dks[2], ddecays[2], self.L,
            *_strides(q, k, erase, log_decay, dy, dks[2]),
            *ddecays.stride()[1:5], **self.keys, **self.values, **self.decays, **self.resets,
        )  # fmt: skip
        blocks = triton.cdiv(K, self.narrow_keys["BLOCK_K"])
        for part, (x, dmet, through_states, dx) in enumerate(
            ((erase, dleft, de, grads.erase), (q, dread, dq, grads.q))
        ):
            self.launch(
                triton_backward.of_met, blocks, x, k, log_decay, self.reset, dmet, through_states, dx, dks[part],
                ddecays[part], self.L, *_strides(x, k, log_decay, dx, dks[part]), *ddecays.stride()[1:5],
                **self.narrow_keys, **self.decays, **self.resets, LEVELS=LEVELS,
            )  # fmt: skip
        grads.k.copy_(dks.sum(0))
        grads.log_decay.copy_(ddecays.sum((0, 1)))
        return dstart_BHKV

    def launch(self, kernel: Any, blocks: int, *arguments: Any, **constants: Any) -> None:
        """Launch programs for each chunk, sequence, head and block of channels."""
        B, N, H = self.each
        kernel[(N, B, H * blocks)](*arguments, N, **self.sizes, **constants, num_warps=4)

    def walk(self, kernel: Any, block_v: int, *arguments: Any) -> None:
        """Launch programs that walk over all chunks of a head, for each block of value channels."""
        (B, N, H), V = self.each, self.values["V"]
        sizes = self.sizes | self.half_keys | self.decays | {"V": V, "BLOCK_V": block_v}
        kernel[(H * triton.cdiv(V, block_v), B)](*arguments, N, **sizes, num_warps=4, num_stages=1)

    def tiles(self, count: int, width: int) -> tuple[Tensor, ...]:
        """Return uninitialised tensors with a matrix for each chunk."""
        return self.new(count, *self.each, CHUNK, width).unbind()

    def new(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=self.reset.device)


def _strides(*tensors: Tensor) -> list[int]:
    """Return the strides of sequences, tokens and heads."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def _block(size: int) -> int:
    """Return the side of a tile, for products at least 16."""
    return max(16, triton.next_power_of_2(size))
