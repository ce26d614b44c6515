"""RMS norm with a SiLU gate in Triton: one kernel forward; backward one, and a sum for the weight's gradient.

Forward, a program takes a token and some of its groups, all where they fit. Backward, it takes several tokens, and
leaves one partial sum of the weight's gradient. Rows may lie apart: gates are a part of what in_proj computes.

Shapes: T tokens, I channels, G groups, C = I / G channels of a group, P programs.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_blackmamba.ops.backends import UP_TO_FP32, Takes, multiprocessors
from megatron_blackmamba.ops.gradients import first_order
from megatron_blackmamba.ops.library import with_channels_contiguous
from megatron_blackmamba.ops.triton_math import sigmoid

TAKES = Takes("cuda", UP_TO_FP32)
LARGEST_C = 8192
TILE = 512
"""Channels of a program where groups are smaller."""
A_WARP = 256
"""Channels of a warp: 8 of each thread. With 16, the backward pass takes 179 registers instead of 97."""
WARPS_AT_ONCE = 16
"""Warps of the backward pass that the registers of a multiprocessor hold, at 128 registers a thread."""
UNIT = 16
"""Largest divisor of the distance between rows that loads need to know."""


def unsupported(x: Tensor, gate: Tensor, weight_I: Tensor, groups: int) -> str | None:
    if {gate.dtype, weight_I.dtype} - {*UP_TO_FP32}:
        return f"takes numbers up to float32, not a gate in {gate.dtype} and weights in {weight_I.dtype}"
    channels = x.shape[-1] // groups
    return None if channels <= LARGEST_C else f"up to {LARGEST_C} channels of a group, not {channels}"


def gated_rms_norm(x: Tensor, gate: Tensor, weight_I: Tensor, groups: int, eps: float, norm_first: bool) -> Tensor:
    return _GatedRmsNorm.apply(x, gate, weight_I, groups, eps, norm_first)


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, groups, eps, norm_first):
        order = _Order.of(x)
        x_TI, gate_TI, weight = order.rows(x), order.rows(gate), weight.contiguous()
        (T, I), G = x_TI.shape, groups
        y_TI = torch.empty(T, I, dtype=x.dtype, device=x.device)
        scale_TG = torch.empty(T, G, dtype=torch.float32, device=x.device)
        tile = _tile(I // G, G)
        if y_TI.numel():
            with torch.cuda.device_of(x):
                gated_norm_forward[(T, tile.blocks)](
                    x_TI, gate_TI, weight, y_TI, scale_TG, *_distances(x_TI, gate_TI), eps,
                    **_units(X=x_TI, GATE=gate_TI), NORM_FIRST=norm_first, **tile.options(),
                )  # fmt: skip
        ctx.save_for_backward(x_TI, gate_TI, weight, scale_TG)
        ctx.order, ctx.tile, ctx.norm_first = order, tile, norm_first
        return order.back(y_TI)

    @staticmethod
    @first_order
    def backward(ctx, grad_y):
        x_TI, gate_TI, weight, scale_TG = ctx.saved_tensors
        grad_TI, (T, I) = ctx.order.rows(grad_y), x_TI.shape
        grad_x_TI, grad_gate_TI = (torch.empty(T, I, dtype=t.dtype, device=t.device) for t in (x_TI, gate_TI))
        if not grad_x_TI.numel():
            return ctx.order.back(grad_x_TI), ctx.order.back(grad_gate_TI), torch.zeros_like(weight), None, None, None
        sums_PI = torch.empty(min(programs(x_TI, ctx.tile), T), I, dtype=torch.float32, device=x_TI.device)
        with torch.cuda.device_of(x_TI):
            gated_norm_backward[(len(sums_PI), ctx.tile.blocks)](
                x_TI, gate_TI, weight, scale_TG, grad_TI, grad_x_TI, grad_gate_TI, sums_PI, T,
                *_distances(x_TI, gate_TI, grad_TI), **_units(X=x_TI, GATE=gate_TI, GRAD=grad_TI),
                NORM_FIRST=ctx.norm_first, **ctx.tile.options(),
            )  # fmt: skip
        grad_weight = sums_PI.sum(0).to(weight.dtype)
        return ctx.order.back(grad_x_TI), ctx.order.back(grad_gate_TI), grad_weight, None, None, None


@dataclass(frozen=True)
class _Order:
    """The order of x's tokens in memory, in which all tensors are read and written."""

    shape: torch.Size
    """Of x, with sequences and tokens swapped where they are in memory."""
    swapped: bool

    @classmethod
    def of(cls, x: Tensor) -> "_Order":
        swapped = x.dim() == 3 and x.stride(0) < x.stride(1)
        return cls((x.transpose(0, 1) if swapped else x).shape, swapped)

    def rows(self, x: Tensor) -> Tensor:
        """Return x as `[T, I]`: a view, if x has this order."""
        x = x.transpose(0, 1) if self.swapped else x
        return with_channels_contiguous(x.reshape(-1, x.shape[-1]))

    def back(self, x_TI: Tensor) -> Tensor:
        x = x_TI.view(self.shape)
        return x.transpose(0, 1) if self.swapped else x


@dataclass(frozen=True)
class _Tile:
    """The groups that a program takes at once, and their channels."""

    C: int
    G: int
    BLOCK_C: int
    BLOCK_G: int
    num_warps: int

    @property
    def blocks(self) -> int:
        return -(-self.G // self.BLOCK_G)

    def options(self) -> dict[str, int]:
        return vars(self)


def _tile(C: int, G: int) -> _Tile:
    width = triton.next_power_of_2(C)
    groups = min(triton.next_power_of_2(G), max(1, TILE // width))
    return _Tile(C, G, width, groups, num_warps=min(max(1, groups * width // A_WARP), WARPS_AT_ONCE))


def programs(x: Tensor, tile: _Tile) -> int:
    """Return as many programs of the backward pass, for each block of groups, as run at once on the GPU."""
    return max(1, multiprocessors(x.device) * (WARPS_AT_ONCE // tile.num_warps) // tile.blocks)


def _distances(*rows: Tensor) -> list[int]:
    """Return the distances between rows, in units that divide them."""
    return [x.stride(0) // gcd(x.stride(0), UNIT) for x in rows]


def _units(**rows: Tensor) -> dict[str, Any]:
    """Return these units, which tell the compiler how many numbers one load may take."""
    return {f"{name}_UNIT": gcd(x.stride(0), UNIT) for name, x in rows.items()}


@triton.jit(do_not_specialize=["x_row", "gate_row"])
def gated_norm_forward(
    x_TI, gate_TI, weight_I, y_TI, scale_TG, x_row, gate_row, eps,
    X_UNIT: tl.constexpr, GATE_UNIT: tl.constexpr, NORM_FIRST: tl.constexpr,
    C: tl.constexpr, G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    g, c = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_C)
    i, inside = g[:, None] * C + c[None, :], (g < G)[:, None] & (c < C)[None, :]
    x = tl.load(x_TI + t * x_row * X_UNIT + i, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_TI + t * gate_row * GATE_UNIT + i, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_I + i, mask=inside, other=0.0).to(tl.float32)
    silu = gate * sigmoid(gate)
    u = x if NORM_FIRST else x * silu
    scale_G = tl.rsqrt(tl.sum(u * u, 1) / C + eps)
    y = u * scale_G[:, None] * weight
    if NORM_FIRST:
        y *= silu
    tl.store(y_TI + t * (G * C) + i, y.to(y_TI.dtype.element_ty), mask=inside)
    tl.store(scale_TG + t * G + g, scale_G, mask=g < G)


@triton.jit(do_not_specialize=["T", "x_row", "gate_row", "grad_row"])
def gated_norm_backward(
    x_TI, gate_TI, weight_I, scale_TG, grad_TI, grad_x_TI, grad_gate_TI, sums_PI, T, x_row, gate_row, grad_row,
    X_UNIT: tl.constexpr, GATE_UNIT: tl.constexpr, GRAD_UNIT: tl.constexpr, NORM_FIRST: tl.constexpr,
    C: tl.constexpr, G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    g, c = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_C)
    i, inside = g[:, None] * C + c[None, :], (g < G)[:, None] & (c < C)[None, :]
    sums = tl.zeros((BLOCK_G, BLOCK_C), tl.float32)
    first = tl.program_id(0).to(tl.int64)
    for t in range(first, T, tl.num_programs(0)):
        x = tl.load(x_TI + t * x_row * X_UNIT + i, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_TI + t * gate_row * GATE_UNIT + i, mask=inside, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_TI + t * grad_row * GRAD_UNIT + i, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_TG + t * G + g, mask=g < G, other=0.0)[:, None]
        share = sigmoid(gate)
        silu = gate * share
        grad = grad_y * silu if NORM_FIRST else grad_y
        normal = (x if NORM_FIRST else x * silu) * scale
        sums += grad * normal
        weight = tl.load(weight_I + i, mask=inside, other=0.0).to(tl.float32)  # again: it would hold registers
        grad *= weight
        grad_u = scale * (grad - normal * (tl.sum(grad * normal, 1) / C)[:, None])
        if NORM_FIRST:
            grad_x, grad_silu = grad_u, grad_y * normal * weight
        else:
            grad_x, grad_silu = grad_u * silu, grad_u * x
        grad_gate = grad_silu * (share + silu * (1.0 - share))
        tl.store(grad_x_TI + t * (G * C) + i, grad_x.to(grad_x_TI.dtype.element_ty), mask=inside)
        tl.store(grad_gate_TI + t * (G * C) + i, grad_gate.to(grad_gate_TI.dtype.element_ty), mask=inside)
    tl.store(sums_PI + tl.program_id(0) * (G * C) + i, sums, mask=inside)
