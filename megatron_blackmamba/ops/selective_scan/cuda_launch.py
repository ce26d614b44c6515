"""Launch the kernels of scan.cu.

Shapes: B batch, L length, I inner channels, N state, S segments, T steps, K blocks of channels.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.ops import nvrtc
from megatron_blackmamba.ops.selective_scan.problem import Gradients, Kept, Problem
from megatron_blackmamba.ops.selective_scan.triton_tuning import Plan

SOURCE = Path(__file__).with_name("scan.cu")
_FIXED = nvrtc.constants(SOURCE)
WIDTH, STATES, STEP = (_FIXED[name] for name in ("WIDTH", "STATES", "STEP"))
"""Channels of a block, states of a channel, tokens of a step."""
ALIGNMENT = 16  # bytes of an asynchronous copy


def forward(
    p: Problem,
    plan: Plan,
    starts_BSNI: Tensor | None,
    y: Tensor,
    raw_y: Tensor | None,
    end_BNI: Tensor,
    save: bool,
) -> Tensor | None:
    """Fill y, y before the gate and the final state; return the states before each step, [B, T, I, N]."""
    B, L, I, N = p.sizes
    states_BTIN = None
    if save:
        states_BTIN = torch.empty(B, -(-L // STEP), I, N, device=p.u.device, dtype=torch.bfloat16)
    _launch(
        "scan_forward",
        "Forward",
        _defines(p, save, plan.channels),
        (I // WIDTH, B, plan.segments(L)),
        starts=starts_BSNI, y=y, raw_y=raw_y, states=states_BTIN, end=end_BNI, segment=plan.segment or L,
        **_inputs(p), **_strides(y=y),
    )  # fmt: skip
    return states_BTIN


def backward(p: Problem, plan: Plan, kept: Kept, ends_BSNI: Tensor | None, grads: Gradients) -> None:
    """Fill the gradients, from the states that `forward` saved and the gradients of the segments' last states."""
    B, L, I, N = p.sizes
    blocks, length, dy = I // WIDTH, plan.backward_length(L), aligned(kept.dy)
    dz = None if grads.dz is None else aligned(grads.dz)
    dBC_KBLM = torch.empty(blocks, B, L, 2 * N, device=p.u.device, dtype=torch.float32)
    _launch(
        "scan_backward",
        "Backward",
        _defines(p, True, plan.channels),
        (blocks, B, -(-L // length)),
        dy=dy, raw_y=kept.raw_y, states=kept.states, ends=ends_BSNI,
        du=grads.du, ddelta=grads.ddelta, dz=dz, dBC=dBC_KBLM, dA=grads.dA_BGNI, dD=grads.dD_BGI,
        dbias=grads.dbias_BGI, dstart=grads.dstart_BNI, segment=length,
        **_inputs(p), **_strides(dy=dy, raw=kept.raw_y, du=grads.du, dz=dz),
    )  # fmt: skip
    if grads.dz is not None and dz is not None and dz is not grads.dz:
        grads.dz.copy_(dz)
    groups = -(-B * L * 2 * N // (4 * _FIXED["SUM_THREADS"]))
    _launch(
        "sum_of_blocks", "SumOfBlocks", _defines(p, True, plan.channels), (groups, 1, 1),
        parts=dBC_KBLM, dBC=grads.dBC, blocks=blocks, tokens=B * L,
    )  # fmt: skip


def aligned(rows: Tensor) -> Tensor:
    """Return rows that can be copied 16 bytes at a time: these, or a copy."""
    width = ALIGNMENT // rows.element_size()
    even = rows.stride(-1) == 1 and all(stride % width == 0 for stride in rows.stride()[:-1])
    return rows if even and rows.data_ptr() % ALIGNMENT == 0 else rows.contiguous()


def _defines(p: Problem, save: bool, channels: int) -> dict[str, int]:
    return {
        "HAS_Z": int(p.z is not None),
        "HAS_RESET": int(p.reset is not None),
        "SOFTPLUS": int(p.softplus),
        "RAGGED": int(p.sizes[1] % STEP != 0),
        "SAVE": int(save),
        "CHANNELS": channels,
        "LOG_A": int(p.log_A),
    }


def _inputs(p: Problem) -> dict[str, Any]:
    tensors: dict[str, Any] = {"u": p.u, "delta": p.delta, "z": p.z, "B": p.B, "C": p.C}
    rest = {"A": p.A_IN, "D": p.D, "bias": p.bias, "reset": p.reset, "L": p.sizes[1], "I": p.sizes[2]}
    return tensors | rest | _strides(**tensors)


def _strides(**tensors: Tensor | None) -> dict[str, int]:
    """Return the strides of sequences and tokens under the names that the structures give them."""
    return {
        f"{name}_{axis}": 0 if x is None else x.stride(at)
        for name, x in tensors.items()
        for at, axis in enumerate("bt")
    }


def _launch(
    kernel: str,
    structure: str,
    defines: dict[str, int],
    grid: tuple[int, int, int],
    **arguments: Any,
) -> None:
    known = nvrtc.constants(SOURCE, tuple(defines.items()))
    name = kernel.removeprefix("scan_").partition("_")[0].upper()
    threads, shared_bytes = known[f"{name}_THREADS"], known.get(f"{name}_BYTES", 0)
    nvrtc.launch(SOURCE, kernel, structure, defines, grid, threads, shared_bytes, arguments)
