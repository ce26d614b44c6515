"""The costs of PyTorch's SSD scan, for plans: memory in its backward pass, and a GPU's traffic for Mamba-3.

Shapes: I inner channels of this rank, H heads, GN groups times state, N state, S angles, R rows of B and C of a token.
"""

from typing import NamedTuple

from megatron_blackmamba.costs import FP32, Sizes, Work
from megatron_blackmamba.ops.ssd.chunked import CHUNK, DECAYS


def working(at: Sizes, I: int, H: int, GN: int, N: int, R: int = 1) -> int:
    """Return the bytes of gradients of the whole sequence, and of copies for each token of a segment, in fp32.

    The copies are x, decays, scores, B and C, and the states of the segment's chunks. A chunk has CHUNK rows.
    """
    length = at.sequence // at.context
    batch = at.whole // length
    segment = max(1, CHUNK // R) * max(1, DECAYS[at.device] // (batch * H * CHUNK**2))
    numbers = R * (9 * I + 2 * H * CHUNK + 3 * I * N // CHUNK + 5 * GN)
    return at.width * at.whole * (I + 2 * R * GN + H) + max(FP32, at.width) * batch * min(length, segment) * numbers


class Passes(NamedTuple):
    """How often a Mamba-3 layer reads or writes numbers in fp32, between its projections."""

    rows: float
    """B or C of all heads, R * H * N for each token."""
    inputs: float
    """x, R * I."""
    pairs: float
    """Scores or decays inside a chunk, R * H * CHUNK."""
    angles: float
    """H * S."""


FORWARD, BACKWARD = Passes(13, 49, 3, 30), Passes(53, 139, 31, 95)
"""Fitted to rehearsals of nine shapes, within 6%; the backward pass repeats the forward pass of each segment."""


def passes(at: Sizes, I: int, H: int, N: int, S: int, R: int) -> tuple[Work, Work]:
    """Return the traffic of a Mamba-3 layer between its projections, forward and backward. Bytes bound its products."""
    numbers = Passes(R * H * N, R * I, R * H * CHUNK, H * S)
    each = max(FP32, at.width) * at.whole
    there, back = (sum(a * b for a, b in zip(count, numbers, strict=True)) for count in (FORWARD, BACKWARD))
    return Work(each * there), Work(each * back)
