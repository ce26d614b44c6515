"""The selective scan in CUDA C++, compiled at run time: bf16 in and out, 16 states, states kept for the backward pass.

It does what the backend "triton" does in half the time, for the shapes that Mamba-1 trains with. Triton keeps the other
dtypes and state sizes, states that are recomputed, and GPUs before Hopper; its small kernels also join segments here.

Shapes: B batch, L length, I inner channels, N state.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops.backends import Takes, multiprocessors
from megatron_blackmamba.ops.context import Chain
from megatron_blackmamba.ops.selective_scan.costs import in_segments
from megatron_blackmamba.ops.selective_scan.cuda_launch import STATES, WIDTH, aligned
from megatron_blackmamba.ops.selective_scan.inputs import Inputs

if TYPE_CHECKING:
    from megatron_blackmamba.ops.selective_scan.triton_tuning import Plan

TAKES = Takes("cuda", (torch.bfloat16,))
TAKES_CHAIN = TAKES_MEMORY_OPTIONS = True
SHARED = ("u_BLI", "delta_BLI", "B_BLN", "C_BLN", "z_BLI")
ONE_CHANNEL_BLOCKS = 3  # on one processor: up to here one channel a thread is faster, from there on two are


def unavailable() -> str | None:
    return backends.why_not(__package__, "triton")


def smallest(device: str) -> None:
    """Scan and differentiate one sequence, which compiles the kernels."""
    u, delta, z = torch.ones(3, 1, 4, WIDTH, device=device, dtype=torch.bfloat16).requires_grad_().unbind()
    B, C = torch.ones(2, 1, 4, STATES, device=device, dtype=torch.bfloat16)
    y, _ = scan(Inputs(u, delta, -torch.ones(WIDTH, STATES, device=device, dtype=torch.float32), B, C, z_BLI=z))
    y.sum().backward()
    if not bool(y.isfinite().all()):
        raise ArithmeticError("a scan of ones is not finite")


def unsupported(inputs: Inputs) -> str | None:
    I, N = inputs.A_IN.shape
    for name in SHARED:
        x = getattr(inputs, name)
        if x is not None and x.dtype != torch.bfloat16:
            return f"takes bfloat16, {name.partition('_')[0]} is {x.dtype}"
    if N != STATES or I % WIDTH:
        return f"takes {STATES} states and multiples of {WIDTH} channels, not {N} and {I}"
    return backends.refusal(__package__, "triton", inputs)


def scan(
    inputs: Inputs,
    plan: "Plan | None" = None,
    chain: Chain | None = None,
    z_gradient: Callable[[Tensor], Tensor] | None = None,
    keep_states: bool = True,
    log_A: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the scan; the arguments are those of the backend "triton"."""
    from megatron_blackmamba.ops.selective_scan import gpu, triton

    if not keep_states:
        return triton.scan(inputs, None, chain, z_gradient, keep_states, log_A)
    B, L, I = inputs.u_BLI.shape
    even: dict[str, Any] = {name: None if (x := getattr(inputs, name)) is None else aligned(x) for name in SHARED}
    plan = plan or rule(B, L, I, multiprocessors(inputs.u_BLI.device))
    return gpu.scan(inputs._replace(**even), plan, chain, z_gradient, log_A)


def rule(B: int, L: int, I: int, processors: int = 132) -> "Plan":
    """Choose whole sequences where their blocks give every processor one, else segments."""
    from megatron_blackmamba.ops.selective_scan.triton_tuning import Plan

    blocks = B * I // WIDTH
    plan = Plan(keep=True, group=B, cuda=True, channels=1 if blocks <= ONE_CHANNEL_BLOCKS * processors else 2)

    def segment(wanted: int) -> int:
        length = -(-L // (max(wanted, 1) * plan.chunk)) * plan.chunk
        return 0 if length >= L else length

    if in_segments("scan_forward", blocks, processors):
        plan = replace(plan, segment=segment(2 * processors // blocks))
    if in_segments("scan_backward", blocks, processors):
        plan = replace(plan, backward_segment=segment(2 * processors // blocks))
    return plan
