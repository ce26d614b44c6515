"""The time that operations take on a GPU at best: the largest of its bytes, arithmetic, instructions and launches.

Calculated, not measured: products run at a share of their peak, and bytes at the speed that kernels reach.
`benchmarks.rehearse` applies it to every operation of a rehearsed step, and `times.py` to the operations that layer
kinds declare. `times.py` also has the time of the host.
"""

from __future__ import annotations

from megatron_blackmamba.costs import Work
from megatron_blackmamba.plan.gpus import Gpu

LAUNCH_SECONDS = 2.5e-6
"""The smallest kernel, with the gap to the next."""


def seconds(work: Work, gpu: Gpu, precision: str = "bf16") -> float:
    """Return the time of one operation."""
    return max(
        work.moved / (1e9 * gpu.memory_gb_s),
        work.flops / gpu.reached(precision),
        work.slots / (1e12 * gpu.issue_t_s),
        work.launches * LAUNCH_SECONDS,
    )
