"""The bytes that the scan keeps and the work of its kernels, for plans: arithmetic without torch.

Shapes: I inner channels of this rank, N state; cells are tokens times channels.
"""

from megatron_blackmamba.costs import FP32, Sizes, Work

CHUNK = {"cpu": 16, "cuda": 64}
"""Tokens between the states that the scan keeps."""
SLOTS = {"segment_ends": 13.0, "forward": 25.0, "chunk_parts": 32.0, "backward": 68.0}
KEPT_SLOTS = SLOTS | {"chunk_parts": 16.0, "backward": 65.0}
"""Time of the Triton kernels on an H200, in issue slots per state and token, the second if states are kept.

A forward pass that keeps few states was not timed alone."""
PROCESSORS, BLOCK = 132, 128
"""Processors of an H100 or H200, and channels of a block of the CUDA kernels, which keep states."""
CUDA_SLOTS = {"scan_forward": (17.0, 12.6), "scan_backward": (46.4, 34.5)}
"""Their time on an H100: with one block on a processor, and for each of two, which share its instruction slots."""
FULL = 33_792
"""Sequences times channels below which the Triton kernels run in segments, which takes a first pass forward."""
BACKWARD_STEPS, BACKWARD_BLOCK = 4, 32
"""Tokens between the states that are kept or that the backward pass writes, and channels that share partial sums."""
ONE_PASS = 8 * 8 * PROCESSORS * BACKWARD_BLOCK
"""Sequences times channels below which the Triton kernels run the backward pass of kept states in segments."""


def kept(at: Sizes, I: int, N: int) -> float:
    """Return the bytes that it keeps of a token: states between chunks, or of every few tokens with y before the gate.

    Its inputs are not counted.
    """
    if at.device == "cuda" and at.keeps_states:
        return at.width * (I + N * I / BACKWARD_STEPS)
    return FP32 * N * I / CHUNK[at.device]


def cuda_slots(kernel: str, blocks: int) -> float:
    """Return the issue slots per state and token of a CUDA kernel, from the processor that has most blocks."""
    alone, shared = CUDA_SLOTS[kernel]
    most = -(-blocks // PROCESSORS)
    if in_segments(kernel, blocks):
        return shared
    in_twos = most - most % 2 if kernel == "scan_backward" else most * (most > 1)
    return (in_twos * shared + (most - in_twos) * alone) * PROCESSORS / blocks


def in_segments(kernel: str, blocks: int, processors: int = PROCESSORS) -> bool:
    """Return whether so few blocks are cut into segments, which another kernel joins."""
    return (3 if kernel == "scan_forward" else 2) * blocks <= processors


def work(at: Sizes, I: int, N: int) -> tuple[list[Work], list[Work]]:
    """Return the operations of the kernels that run here: those in CUDA C++, or those in Triton."""
    if not (at.keeps_states and at.width == 2 and N == 16 and I % BLOCK == 0):
        return _triton_work(at, I, N)
    cells, blocks = at.whole * I, at.sequences * I // BLOCK
    one, sums = at.width * cells, 2 * FP32 * N * cells / BLOCK
    states = at.width * N * cells / BACKWARD_STEPS
    forward = Work(5 * one + states, slots=cuda_slots("scan_forward", blocks) * N * cells)
    backward = Work(8 * one + states + sums, slots=cuda_slots("scan_backward", blocks) * N * cells)
    first_pass = [Work(2 * one, slots=SLOTS["segment_ends"] * N * cells)] if in_segments("scan_forward", blocks) else []
    of_segments = (
        [Work(4 * one, slots=KEPT_SLOTS["chunk_parts"] * N * cells)] if in_segments("scan_backward", blocks) else []
    )
    return [forward, *first_pass], [backward, Work(sums), *of_segments]


def _triton_work(at: Sizes, I: int, N: int) -> tuple[list[Work], list[Work]]:
    """Return the same for the Triton kernels; they run in segments where sequences do not fill the GPU."""
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
