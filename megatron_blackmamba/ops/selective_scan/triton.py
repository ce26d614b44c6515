"""The selective scan in Triton: fp32 state in registers, bf16 in and out, no atomics, no compiler but Triton's own."""

from collections.abc import Callable

from torch import Tensor

from megatron_blackmamba.ops.backends import UP_TO_FP32, Takes
from megatron_blackmamba.ops.context import Chain
from megatron_blackmamba.ops.selective_scan import gpu
from megatron_blackmamba.ops.selective_scan.inputs import Inputs
from megatron_blackmamba.ops.selective_scan.triton_tuning import Plan, plan_for
from megatron_blackmamba.ops.triton_support import too_long

TAKES = Takes("cuda", UP_TO_FP32)
TAKES_CHAIN = TAKES_MEMORY_OPTIONS = True
SHORTEST_CHUNK = 32  # of any plan


def unsupported(inputs: Inputs) -> str | None:
    u_BLI, N = inputs.u_BLI, inputs.A_IN.shape[1]
    if N not in (4, 8, 16, 32, 64):
        return f"the state size is 4, 8, 16, 32 or 64, not {N}"
    return "the input is empty" if u_BLI.numel() == 0 else too_long(*u_BLI.shape[:2], SHORTEST_CHUNK)


def scan(
    inputs: Inputs,
    plan: Plan | None = None,
    chain: Chain | None = None,
    z_gradient: Callable[[Tensor], Tensor] | None = None,
    keep_states: bool = True,
    log_A: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the scan (`gpu.scan`), by default with the fastest plan for its size."""
    plan = plan or plan_for(inputs.u_BLI, inputs.A_IN.shape[1], keep_states, scan)
    return gpu.scan(inputs, plan, chain, z_gradient, log_A)
