"""The costs of the delta rule in Triton, for plans: memory in its backward pass, and a GPU's work.

Shapes: H heads, K key channels of a head, V value channels, D decays of a head, T tokens of a chunk.
"""

from megatron_blackmamba.costs import FP32, Sizes, Work
from megatron_blackmamba.ops.delta.chunked import CHUNK as T

WIDEST = 128
"""Key channels of a head that the Triton kernels take at most."""
INSTRUCTIONS = {
    "weigh": (2_752, 4_160),
    "meet": (2_476, 44_700),
    "solve": (13_333, 13_333),
    "carry_states": (6_772, 6_756),
    "read_outputs": (6_912, 6_912),
    "of_outputs": (2_656, 2_656),
    "carry_gradients": (18_200, 18_184),
    "of_values": (5_283, 5_283),
    "of_states": (18_496, 19_356),
    "of_met": (10_464, 88_520),
}
"""Instructions of a warp for a chunk of a head, all its programs together: with one decay a head, and by channel.

They were counted on sm_90 with 128 key and value channels (docs/kernels.md), not measured.
"""
THREADS = 128
SLOTS = 2.5
"""Issue slots of an instruction, as measured for the Triton kernels of the selective scan."""
FORWARD = ("weigh", "meet", "meet", "solve", "carry_states")
BACKWARD = (*FORWARD, "of_outputs", "carry_gradients", "of_values", "of_states", "of_met", "of_met")


def in_triton(at: Sizes, K: int) -> bool:
    """Return whether `kernels.delta` takes the Triton kernels on this device."""
    return at.device == "cuda" and at.delta == "triton" and at.width <= FP32 and K <= WIDEST


def slots(kernel: str, by_channel: bool, token_heads: int, K: int = WIDEST, V: int = WIDEST) -> float:
    """Return the issue slots of one launch."""
    share = (K + V) / (2 * WIDEST)
    return INSTRUCTIONS[kernel][by_channel] * share * THREADS * SLOTS * token_heads / T


def numbers(K: int, V: int, D: int) -> int:
    """Return how many fp32 numbers a token of a head has in the backward pass, without the gradients of inputs."""
    return 10 * K + 5 * V + 5 * T + 3 * D + 2 * K * V // T


def work(token_heads: int, K: int, V: int, D: int) -> tuple[list[Work], list[Work]]:
    """Return the operations of the Triton kernels."""
    state = K * V // T
    moved = {
        "weigh": 6 * K + D,
        "meet": 2 * K + D + T,
        "solve": 2 * (T + K + V),
        "carry_states": 2 * K + 2 * V + state,
        "read_outputs": T + K + 2 * V + state,
        "of_outputs": T + 2 * V,
        "carry_gradients": 3 * K + 3 * V + state,
        "of_values": 3 * T + 5 * V,
        "of_states": 6 * K + 2 * D + 3 * V + 2 * state,
        "of_met": 5 * K + 2 * D + T,
    }

    def launch(kernel: str) -> Work:
        return Work(FP32 * moved[kernel] * token_heads, slots=slots(kernel, D > 1, token_heads, K, V))

    added_up = Work(FP32 * 4 * (K + D) * token_heads)
    return [launch(kernel) for kernel in (*FORWARD, "read_outputs")], [*map(launch, BACKWARD), added_up]
