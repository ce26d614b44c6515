"""The memory that PyTorch's SSD scan needs in its backward pass, for plans.

Shapes: I inner channels of this rank, H heads, GN groups times state, N state.
"""

from megatron_blackmamba.costs import FP32, Sizes
from megatron_blackmamba.ops.ssd.chunked import CHUNK, DECAYS


def working(at: Sizes, I: int, H: int, GN: int, N: int) -> int:
    """Return the bytes of gradients of the whole sequence, and of copies for each token of a segment, in fp32.

    The copies are x, decays, scores, B and C, and the states of the segment's chunks.
    """
    length = at.sequence // at.context
    batch = at.whole // length
    segment = CHUNK * max(1, DECAYS[at.device] // (batch * H * CHUNK**2))
    numbers = 9 * I + 2 * H * CHUNK + 3 * I * N // CHUNK + 8 * GN
    return at.width * at.whole * (I + 2 * GN + H) + max(FP32, at.width) * batch * min(length, segment) * numbers
