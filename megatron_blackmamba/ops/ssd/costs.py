"""The costs of the SSD scan, for plans: memory in its backward pass, and a GPU's work.

Shapes: I inner channels of this rank, H heads, P channels of a head, G groups, N state, GN groups times state,
S angles, R rows of B and C of a token.
"""

from typing import NamedTuple

from megatron_blackmamba.costs import FP32, Sizes, Work
from megatron_blackmamba.ops.ssd.chunked import CHUNK, DECAYS

WIDEST = 128
"""Channels of a head, and its state, that the Triton kernels take at most."""
STATES = 64
"""States of a program of `of_groups`."""
PROGRAMS = 4 * 132
"""Programs that fill an H100 or H200 evenly."""
SLOTS = {"pass_states": 0.31, "outputs": 0.50, "of_heads": 1.57, "of_groups": 0.97}
"""Issue slots of the Triton kernels per state and token, calculated, not measured.

These are instructions on sm_90 with 64 channels and 128 states (docs/kernels.md) times 2.5, the ratio of slots to
instructions that was measured for the Triton kernels of the selective scan.
"""


def in_triton(at: Sizes, P: int, N: int, R: int = 1) -> bool:
    """Return whether `kernels.ssd` takes the Triton kernels on this device."""
    fits = max(P, N) <= WIDEST and CHUNK % R == 0
    return at.device == "cuda" and at.ssd in ("auto", "triton") and at.width <= FP32 and fits


def heads_of_program(chunks: int, G: int, heads: int, N: int) -> int:
    """Return how many of a group's heads a program of `of_groups` adds up, for the chunks of a whole batch."""
    return min(heads, -(-chunks * G * -(-N // STATES) * heads // PROGRAMS))


def working_in_triton(at: Sizes, I: int, H: int, G: int, N: int) -> int:
    """Return the bytes of the backward pass: gradients, states twice, sums of steps, shares of B and C."""
    chunks = at.whole // CHUNK + 1
    shares = -(-H // G // heads_of_program(chunks, G, H // G, N))
    gradients = at.width * at.whole * (I + 2 * G * N + H)
    shared = 2 * FP32 * at.whole * G * N * shares if shares > 1 else 0
    return gradients + 2 * at.width * chunks * I * N + 3 * FP32 * at.whole * H + shared


def work_in_triton(at: Sizes, I: int, N: int) -> tuple[list[Work], list[Work]]:
    """Return the operations of the Triton kernels."""
    x, states = at.width * at.whole * I, at.width * at.whole * I * N // CHUNK
    slots = {kernel: share * at.whole * I * N for kernel, share in SLOTS.items()}
    passed = Work(x + states, slots=slots["pass_states"])
    forward = [passed, Work(2 * x + states, slots=slots["outputs"])]
    backward = [passed, passed, Work(3 * x + 2 * states, slots=slots["of_heads"])]
    return forward, [*backward, Work(4 * x + 2 * states, slots=slots["of_groups"])]


def working(at: Sizes, I: int, H: int, GN: int, N: int, R: int = 1) -> int:
    """Return the bytes of a scan in segments: gradients of the whole sequence, and fp32 copies in a segment.

    The copies are x, B and C; in PyTorch also decays, scores, and the states of the segment's chunks. Triton has these
    states twice, in the dtype of the inputs. A chunk has CHUNK rows.
    """
    length = at.sequence // at.context
    batch = at.whole // length
    segment = max(1, CHUNK // R) * max(1, DECAYS[at.device] // (batch * H * CHUNK**2))
    if in_triton(at, I // H, N, R):
        in_chunks = 2 * at.width * I * N // CHUNK // FP32
    else:
        in_chunks = 2 * H * CHUNK + 3 * I * N // CHUNK
    numbers = R * (9 * I + in_chunks + 5 * GN)
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
    mixed: float = 0
    """R * I where R is above 1."""


IN_PYTORCH = Passes(13, 49, 3, 30), Passes(53, 139, 31, 95)
"""Forward and backward, which repeats the former; fitted to rehearsals of nine shapes, within 6%."""
IN_TRITON = Passes(10, 21, 0, 27, 18), Passes(60, 60, 0, 85, 72)
"""The same where the scan runs in Triton; of eight shapes, within 6%."""


def passes(at: Sizes, I: int, H: int, N: int, S: int, R: int) -> tuple[Work, Work]:
    """Return the traffic of a Mamba-3 layer between its projections, forward and backward. Bytes bound its products."""
    numbers = Passes(R * H * N, R * I, R * H * CHUNK, H * S, R * I * (R > 1))
    each = max(FP32, at.width) * at.whole
    counts = IN_TRITON if in_triton(at, I // H, N, R) else IN_PYTORCH
    there, back = (sum(a * b for a, b in zip(count, numbers, strict=True)) for count in counts)
    return Work(each * there), Work(each * back)
