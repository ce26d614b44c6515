"""The SSD scan in Triton: states pass from chunk to chunk in one kernel, and chunks run in parallel in the others.

bf16 goes into products as it is, and states between chunks are saved in it; sums are fp32. Other inputs are multiplied
as fp32. Only the inputs are kept for the backward pass, which computes the states again. Sums over the heads of a group
are taken inside a program, then over programs in a fixed order: there are no atomics. What comes out lies in memory as
x does, [B, L] or [L, B].

Shapes: B batch, L length, H heads, P channels of a head, G groups of heads, N state, R rows of B and C of a token,
K chunks, U rows: L * R.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from megatron_blackmamba.ops.backends import UP_TO_FP32, Takes
from megatron_blackmamba.ops.gradients import first_order
from megatron_blackmamba.ops.library import empty_like_rows, with_channels_contiguous
from megatron_blackmamba.ops.ssd import chunked, triton_backward, triton_forward
from megatron_blackmamba.ops.ssd.chunked import CHUNK
from megatron_blackmamba.ops.ssd.costs import STATES, WIDEST, heads_of_program
from megatron_blackmamba.ops.ssd.inputs import Inputs
from megatron_blackmamba.ops.triton_support import GRID

TAKES = Takes("cuda", UP_TO_FP32)
TILE = 64 * 128
"""Numbers of a state that four warps hold in `pass_states`, 64 in each thread."""
OUTPUT_HEADS = 4
"""Heads of a program of outputs: they share the products of B and C."""
BLOCK_H = 16


def unsupported(inputs: Any) -> str | None:
    """Return why the kernels do not scan the inputs of `ssd` or of Mamba-3, or None."""
    (B, _, H, P), N = inputs.x_BLHP.shape, inputs.state_size
    if max(P, N) > WIDEST:
        return f"heads have at most {WIDEST} channels and states, not {P} and {N}"
    if CHUNK % inputs.rows:
        return f"the rows of a token divide {CHUNK}, not {inputs.rows}"
    if inputs.x_BLHP.numel() == 0 or N == 0:
        return "the input is empty"
    return f"at most {GRID:,} sequences, and half as many heads" if max(B, 2 * H) > GRID else None


def scan(inputs: Any) -> tuple[Tensor, Tensor]:
    """Scan the inputs of `ssd`, or those of Mamba-3 in segments."""
    return _Scan.apply(1, *inputs) if isinstance(inputs, Inputs) else chunked.scan(inputs, _segment)


@torch.no_grad()
def final_state(inputs: Any) -> Tensor:
    """Return the state behind the last token, at a part of the cost of a scan."""
    if isinstance(inputs, Inputs):
        return _states(_Problem(1, inputs), save=False)[1]
    return chunked.final_state(inputs)


def _segment(inputs: Any, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a segment of Mamba-3, and the state behind it; what is not the scan stays in PyTorch."""
    R, terms = inputs.rows, chunked.in_chunks(inputs, inputs.x_BLHP.shape[1]).terms(state.dtype, outputs=True)
    wide = (terms.x_BKUHP, terms.B_BKGUN.transpose(2, 3), terms.C_BKGUN.transpose(2, 3))
    x, B, C = (v[:, 0].to(inputs.x_BLHP.dtype) for v in wide)
    y_BUHP, end_BHPN = _Scan.apply(R, x, terms.steps_BKTH[:, 0], None, B, C, None, None, state, inputs.reset_BL)
    B, C = (v.unflatten(3, (-1, R)) for v in (terms.B_BKGUN, terms.C_BKGUN))
    own = (C * B).sum(-1, keepdim=True) if R == 1 else C @ B.mT
    y_BLHP = chunked.with_own_token(y_BUHP[:, None], own, terms)[:, 0].to(inputs.x_BLHP.dtype)
    return y_BLHP if R == 1 else y_BLHP.unflatten(1, (-1, R)), end_BHPN


class _Scan(torch.autograd.Function):
    """The scan of rows: R of them are a token. Without A, dt are the steps, and x is already weighted."""

    @staticmethod
    def forward(ctx, R: int, *arguments):
        inputs = Inputs(*arguments)
        with torch.cuda.device_of(inputs.x_BLHP):
            p = _Problem(R, inputs)
            states, end_BHPN = _states(p)
            wide = torch.float32 if p.A_H is None else None  # Mamba-3 adds to it
            y = _like(p.x, wide)
            share = min(OUTPUT_HEADS, p.sizes["HEADS"])
            triton_forward.outputs[(p.chunks, p.batch, p.G * triton.cdiv(p.sizes["HEADS"], share))](
                p.x, p.B, p.C, p.or_x(p.D_H), *p.sums, states, y, p.rows, *_strides(p.x, p.B, p.C, y), p.chunks,
                **p.sizes, **p.blocks, SHARE=share, R=R, WEIGHTED=p.A_H is not None, HAS_D=p.D_H is not None,
                num_warps=4, num_stages=3 if p.narrow else 1,
            )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.R = R
        ctx.save_for_backward(*arguments)
        return y, end_BHPN

    @staticmethod
    @first_order
    def backward(ctx, dy, dend_BHPN):
        inputs = Inputs(*ctx.saved_tensors)
        p = _Problem(ctx.R, inputs)
        dy = torch.zeros_like(p.x) if dy is None else with_channels_contiguous(dy)
        states, _ = _states(p)
        dends, dstart_BHPN = _states(p, dy, dend_BHPN)
        dx, drate = _like(p.x), empty_like_rows(p.rate)
        parts_BKMH = p.new(p.batch, p.chunks, 3, p.H)
        triton_backward.of_heads[(p.chunks, p.batch, p.H)](
            p.x, p.B, p.C, p.rate, p.or_x(p.A_H), p.or_x(p.D_H), p.or_x(p.bias_H), *p.sums, states, dends, dy,
            dx, drate, parts_BKMH, p.rows, *_strides(p.x, p.B, p.C, dy, dx),
            *p.rate.stride()[:2], *drate.stride()[:2], p.chunks, **p.sizes, **p.blocks, R=p.R,
            FROM_DT=p.A_H is not None, HAS_BIAS=p.bias_H is not None, HAS_D=p.D_H is not None, num_warps=4,
        )  # fmt: skip
        heads, block_n = p.sizes["HEADS"], min(p.blocks["BLOCK_N"], STATES)
        blocks = triton.cdiv(p.N, block_n)
        share = heads_of_program(p.chunks * p.batch, p.G, heads, p.N)
        shares = triton.cdiv(heads, share)
        sums = torch.float32 if shares > 1 else p.products
        dB, dC = (_like(v, sums, shares) for v in (p.B, p.C))
        triton_backward.of_groups[(p.chunks, p.batch, p.G * shares * blocks)](
            p.x, p.B, p.C, *p.sums, states, dends, dy, dB, dC, p.rows, *_strides(p.x, p.B, p.C, dy),
            *dB.stride()[:2], *dC.stride()[:2], p.chunks, **p.sizes, BLOCK_P=p.blocks["BLOCK_P"], BLOCK_N=block_n,
            SHARE=share, R=p.R, WEIGHTED=p.A_H is not None, num_warps=4, num_stages=2 if p.narrow else 1,
        )  # fmt: skip
        found = dict(zip(("A_H", "D_H", "dt_bias_H"), parts_BKMH.sum((0, 1)), strict=True))
        found |= {"x_BLHP": dx, "dt_BLH": drate, "initial_state_BHPN": dstart_BHPN}
        for name, parts, like in (("B_BLGN", dB, p.B), ("C_BLGN", dC, p.C)):
            found[name] = parts
            if shares > 1:
                found[name] = torch.sum(parts.unflatten(2, (p.G, shares)), 3, out=_like(like, torch.float32))
        given = inputs._asdict()
        return None, *(
            found[name].to(given[name].dtype) if needed else None
            for name, needed in zip(inputs._fields, ctx.needs_input_grad[1:], strict=True)
        )


class _Problem:
    """The inputs as the kernels take them, with the sums of steps in chunks."""

    def __init__(self, R: int, inputs: Inputs) -> None:
        x, rate, A_H, B, C, D_H, bias_H, start, reset_BL = inputs
        self.R, self.x, self.rate, self.B, self.C = R, *(with_channels_contiguous(v) for v in (x, rate, B, C))
        self.A_H, self.D_H, self.bias_H, self.start = (
            None if v is None else v.float().contiguous() for v in (A_H, D_H, bias_H, start)
        )
        (self.batch, self.rows, H, P), (self.G, N) = x.shape, B.shape[2:]
        self.H, self.N, self.chunks = H, N, triton.cdiv(self.rows, CHUNK)
        self.narrow = {x.dtype, B.dtype, C.dtype} == {torch.bfloat16}
        self.products = torch.bfloat16 if self.narrow else torch.float32
        self.sizes = {"H": H, "HEADS": H // self.G, "P": P, "N": N, "T": CHUNK}
        self.blocks = {"BLOCK_P": _block(P), "BLOCK_N": _block(N)}
        self.sums = self.new(3, self.batch, H, self.chunks * CHUNK).unbind()
        reset = None if reset_BL is None else reset_BL.contiguous().view(torch.uint8)
        triton_forward.sum_steps[(self.chunks, self.batch, triton.cdiv(H, BLOCK_H))](
            self.rate, self.or_x(self.A_H), self.or_x(self.bias_H), self.or_x(reset), *self.sums,
            self.rate.shape[1], *self.rate.stride()[:2], self.chunks, H=H, R=R, T=CHUNK, BLOCK_H=BLOCK_H,
            FROM_DT=A_H is not None, HAS_BIAS=bias_H is not None, HAS_RESET=reset is not None,
        )  # fmt: skip

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.x.device)

    def or_x(self, tensor: Tensor | None) -> Tensor:
        """Return a valid pointer for an absent input, which is never read."""
        return self.x if tensor is None else tensor


def _states(
    p: _Problem, dy: Tensor | None = None, dend: Tensor | None = None, *, save: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk and behind the last.

    With dy: the gradients of the states behind each chunk, and of the one before the first.
    """
    x, B, start = (p.x, p.B, p.start) if dy is None else (dy, p.C, None if dend is None else dend.contiguous())
    P, N, block_p = p.sizes["P"], p.N, p.blocks["BLOCK_P"]
    states = p.new(p.batch, p.chunks if save else 0, p.H, P, N, dtype=p.products)
    end_BHPN = p.new(p.batch, p.H, P, N)
    block_n = min(p.blocks["BLOCK_N"], TILE // block_p)
    triton_forward.pass_states[(p.H * triton.cdiv(N, block_n), p.batch)](
        x, B, *p.sums, p.or_x(start), states, end_BHPN, p.rows, *_strides(x, B), p.chunks,
        **p.sizes, BLOCK_P=block_p, BLOCK_N=block_n, REVERSE=dy is not None, SAVE=save, HAS_START=start is not None,
        WEIGHTED=dy is None and p.A_H is not None, num_warps=4, num_stages=3 if p.narrow else 2,
    )  # fmt: skip
    return states, end_BHPN


def _like(x_BLHP: Tensor, dtype: torch.dtype | None = None, shares: int = 1) -> Tensor:
    """Return an uninitialised tensor `[B, L, H * shares, P]` with x's order of sequences and tokens in memory."""
    H, P = x_BLHP.shape[2:]
    return empty_like_rows(x_BLHP[:, :, 0], dtype, H * shares * P).unflatten(2, (-1, P))


def _strides(*tensors: Tensor) -> list[int]:
    """Return the strides of sequences, rows, and heads or groups."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def _block(size: int) -> int:
    """Return the side of a tile, for products at least 16."""
    return max(16, triton.next_power_of_2(size))
