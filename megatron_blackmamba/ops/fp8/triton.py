"""Rounding to FP8 by rows in Triton: the largest value of each row, then its numbers, in one kernel.

A program takes some rows and goes over their columns twice; the second time they come from the L2 cache. Rows may lie
along either axis in memory, so that a transposed weight is rounded without a copy.

Shapes: G groups of R rows, C columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_blackmamba.ops.backends import Takes
from megatron_blackmamba.ops.fp8 import reference

TAKES = Takes("cuda")
LARGEST, LEAST = tl.constexpr(reference.LARGEST), tl.constexpr(reference.LEAST)
TILES = {True: (4, 512), False: (64, 32)}
"""Rows and columns that a program reads at once, by whether columns are adjacent in memory."""


def by_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    x_GRC = x if x.dim() == 3 else x.unsqueeze(0)
    groups, rows, columns = x_GRC.shape
    rounded = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    of_rows, of_columns = TILES[x.stride(-1) == 1]
    if rows and groups:
        with torch.cuda.device_of(x):
            round_rows[(triton.cdiv(rows, of_rows), groups)](
                x_GRC, rounded, scale, rows, columns, *x_GRC.stride(), ROWS=of_rows, COLUMNS=of_columns
            )
    return rounded, scale


@triton.jit
def round_rows(
    x_GRC, rounded_GRC, scale_GR, R, C, stride_G, stride_R, stride_C, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    group = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_inside = r < R
    source = x_GRC + group * stride_G + r[:, None] * stride_R
    target = rounded_GRC + (group * R + r[:, None]) * C
    largest = tl.full((ROWS,), LEAST, tl.float32)
    for first in range(0, C, COLUMNS):
        c = first + tl.arange(0, COLUMNS)
        inside = row_inside[:, None] & (c < C)[None, :]
        x = tl.load(source + c[None, :] * stride_C, mask=inside, other=0.0).to(tl.float32)
        size = tl.where(x == x, tl.abs(x), float("inf"))  # the maximum would skip a NaN
        largest = tl.maximum(largest, tl.max(size, 1))
    scale = tl.div_rn(largest, LARGEST)  # as on a CPU: `/` is approximate on a GPU
    tl.store(scale_GR + group * R + r, scale, mask=row_inside)
    for first in range(0, C, COLUMNS):
        c = first + tl.arange(0, COLUMNS)
        inside = row_inside[:, None] & (c < C)[None, :]
        x = tl.load(source + c[None, :] * stride_C, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + c[None, :], tl.div_rn(x, scale[:, None]).to(rounded_GRC.dtype.element_ty), mask=inside)
