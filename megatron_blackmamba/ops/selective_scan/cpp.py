"""The selective scan in C++ (csrc/selective_scan.cpp): forward and backward in one pass over the activations each.

Shapes: B batch, L length, I inner channels, N states (padded to a multiple of 4), R groups of 128 channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops import library
from megatron_blackmamba.ops.backends import FP32_OR_BF16, Takes
from megatron_blackmamba.ops.gradients import first_order
from megatron_blackmamba.ops.library import empty_like_rows, with_channels_contiguous
from megatron_blackmamba.ops.selective_scan.inputs import Inputs

CHUNK, SLICE, GROUP_CHANNELS, MAX_STATES = 16, 4, 128, 64  # as in csrc/rows.h, scan_chunk.h and selective_scan.cpp

TAKES = Takes("cpu", FP32_OR_BF16)


def unsupported(inputs: Inputs) -> str | None:
    states = inputs.A_IN.shape[1]
    return f"{states} states, at most {MAX_STATES} are supported" if states > MAX_STATES else None


def scan(inputs: Inputs) -> tuple[Tensor, Tensor]:
    u_BLI, delta_BLI, A_IN, B_BLN, C_BLN, D_I, z_BLI, delta_bias_I, delta_softplus, initial_state_BIN, reset_BL = inputs
    activations = [x for x in (u_BLI, delta_BLI, z_BLI) if x is not None]
    dtype = torch.bfloat16 if all(x.dtype == torch.bfloat16 for x in activations) else torch.float32
    N = A_IN.shape[1]
    padding = (0, -N % SLICE)
    y_BLI, final_state_BIN = _Scan.apply(
        u_BLI.to(dtype),
        delta_BLI.to(dtype),
        F.pad(A_IN.float(), padding).contiguous(),
        F.pad(B_BLN.float(), padding).contiguous(),
        F.pad(C_BLN.float(), padding).contiguous(),
        None if D_I is None else D_I.float().contiguous(),
        None if z_BLI is None else z_BLI.to(dtype),
        None if delta_bias_I is None else delta_bias_I.float().contiguous(),
        delta_softplus,
        None if initial_state_BIN is None else F.pad(initial_state_BIN.float(), padding).contiguous(),
        None if reset_BL is None else reset_BL.contiguous(),
    )
    return y_BLI.to(u_BLI.dtype), final_state_BIN[:, :, :N]


class _Arguments(library.Arguments):
    """struct SelectiveScan of csrc/selective_scan.h."""

    _fields_ = library.fields(
        "int64 B L I N is_bf16 softplus threads; pointer u delta z; strides u delta z;"
        "pointer A B_in C_out D delta_bias initial_state reset y; strides y;"
        "pointer final_state checkpoints workspace grad_y; strides grad_y;"
        "pointer grad_final_state grad_u grad_delta grad_z; strides grad_u grad_delta grad_z;"
        "pointer grad_A grad_B grad_C grad_D grad_delta_bias grad_initial_state"
    )


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, delta, A, B, C, D, z, delta_bias, softplus, initial_state, reset):
        u, delta = with_channels_contiguous(u), with_channels_contiguous(delta)
        z = None if z is None else with_channels_contiguous(z)
        (batch, length, inner), N = u.shape, A.shape[1]
        y, final_state = empty_like_rows(u), A.new_empty(batch, inner, N)
        checkpoints = None
        if any(ctx.needs_input_grad):
            checkpoints = A.new_empty(batch, -(-length // CHUNK), padded_channels(inner) * N)
        saved = (u, delta, A, B, C, D, z, delta_bias, initial_state, reset, checkpoints)
        arguments = _arguments(*saved, softplus, y=y, final_state=final_state)
        ctx.isa = library.isa()  # the checkpoints are laid out by its vectors
        library.call("selective_scan_forward", arguments, ctx.isa)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.softplus = softplus
        return y, final_state

    @staticmethod
    @first_order
    def backward(ctx, grad_y, grad_final_state):
        saved = ctx.saved_tensors  # once: torch's checkpointing gives them no second time
        u, delta, A, B, C, D, z, delta_bias, initial_state, *_ = saved
        (batch, _, inner), N = u.shape, A.shape[1]
        groups = -(-inner // GROUP_CHANNELS)
        grad_y = u.new_zeros(()).expand_as(u) if grad_y is None else grad_y
        grad_u, grad_delta = empty_like_rows(u), empty_like_rows(delta)
        grad_z = None if z is None else empty_like_rows(z)
        grad_A, grad_initial_state = A.new_empty(batch, inner, N), A.new_empty(batch, inner, N)
        grad_B, grad_C = A.new_empty(groups, *B.shape), A.new_empty(groups, *C.shape)
        grad_D, grad_delta_bias = A.new_empty(batch, inner), A.new_empty(batch, inner)
        arguments = _arguments(
            *saved,
            ctx.softplus,
            grad_y=with_channels_contiguous(grad_y),
            grad_final_state=None if grad_final_state is None else grad_final_state.contiguous(),
            grad_u=grad_u,
            grad_delta=grad_delta,
            grad_z=grad_z,
            grad_A=grad_A,
            grad_B=grad_B,
            grad_C=grad_C,
            grad_D=grad_D,
            grad_delta_bias=grad_delta_bias,
            grad_initial_state=grad_initial_state,
        )
        library.call("selective_scan_backward", arguments, ctx.isa)
        return (
            grad_u,
            grad_delta,
            grad_A.sum(0),
            grad_B.sum(0),
            grad_C.sum(0),
            None if D is None else grad_D.sum(0),
            grad_z,
            None if delta_bias is None else grad_delta_bias.sum(0),
            None,
            None if initial_state is None else grad_initial_state,
            None,
        )


def _arguments(u, delta, A, B, C, D, z, delta_bias, initial_state, reset, checkpoints, softplus, **others):
    (batch, length, inner), N = u.shape, A.shape[1]
    sizes = {"B": batch, "L": length, "I": inner, "N": N, "is_bf16": u.dtype == torch.bfloat16, "softplus": softplus}
    kept = {"initial_state": initial_state, "reset": reset, "checkpoints": checkpoints, **others}
    workspace = A.new_empty(batch, 3, padded_channels(inner) * N)
    return _Arguments(
        **sizes, u=u, delta=delta, z=z, A=A, B_in=B, C_out=C, D=D, delta_bias=delta_bias, workspace=workspace, **kept
    )


def padded_channels(inner: int) -> int:
    return -(-inner // 16) * 16
