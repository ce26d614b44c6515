"""The bytes that the scan keeps and the work of its kernels, for plans: arithmetic without torch.

Shapes: I inner channels of this rank, N state; cells are tokens times channels.
"""

from megatron_blackmamba.costs import FP32, Sizes, Work

CHUNK = {"cpu": 16, "cuda": 64}
"""Tokens between the states that the scan keeps."""
SLOTS = {"segment_ends": 13.0, "forward": 25.0, "chunk_parts": 32.0, "backward": 68.0}
KEPT_SLOTS = SLOTS | {"chunk_parts": 16.0, "backward": 65.0}
"""Time of the scan's kernels on an H200, in issue slots per state and token, the second if states are kept.

Their instructions fill 37% to 48% of it (docs/kernels.md); in the rest, they wait. A forward pass that keeps few states
was not timed alone."""
FULL = 33_792
"""Sequences times channels below which the scan runs in segments, which takes a first pass forward."""
BACKWARD_STEPS, BACKWARD_BLOCK = 4, 32
"""Tokens between the states that are kept or that the scan's backward pass writes, and channels that share partial
sums."""
ONE_PASS = 8 * 8 * 132 * BACKWARD_BLOCK
"""Sequences times channels below which the backward pass of kept states runs in segments."""


def kept(at: Sizes, I: int, N: int) -> float:
    """Return the bytes that it keeps of a token: states between chunks, or of every few tokens with y before the gate.

    Its inputs are not counted.
    """
    if at.device == "cuda" and at.keeps_states:
        return at.width * (I + N * I / BACKWARD_STEPS)
    return FP32 * N * I / CHUNK[at.device]


def work(at: Sizes, I: int, N: int) -> tuple[list[Work], list[Work]]:
    """Return the operations of the kernels; they run in segments where sequences do not fill the GPU."""
    cells, channels = at.whole * I, at.sequences * I
    one, states, sums = at.width * cells, FP32 * N * cells, 2 * FP32 * N * cells / BACKWARD_BLOCK
    slots = {kernel: share * N * cells for kernel, share in (KEPT_SLOTS if at.keeps_states else SLOTS).items()}
    if at.keeps_states:
        written = at.width * N * cells / BACKWARD_STEPS
        forward = Work(5 * one + written, slots=slots["forward"])
        backward = Work(8 * one + written + sums, slots=slots["backward"])
        of_segments = [Work(4 * one, slots=slots["chunk_parts"])] if channels < ONE_PASS else []
    else:
        scratch, checkpoints = states / BACKWARD_STEPS, states / CHUNK["cuda"]
        forward = Work(4 * one + checkpoints, slots=slots["forward"])
        backward = Work(6 * one + scratch + sums, slots=slots["backward"])
        of_segments = [Work(5 * one + scratch + 3 * checkpoints, slots=slots["chunk_parts"])]
    first_pass = [Work(2 * one, slots=slots["segment_ends"])] if channels < FULL else []
    return [forward, *first_pass], [backward, Work(sums), *of_segments]
