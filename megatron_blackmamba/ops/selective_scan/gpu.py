"""The selective scan on GPUs, as the backends "triton" and "cuda" share it: segments, the chain, and what is saved.

A plan says which of them runs the two passes themselves.

Saved for the backward pass are the inputs, the states of every few tokens in the dtype of the inputs, and y before the
gate. Without `Plan.keep`, only one fp32 state every `chunk` tokens is saved, and the others are recomputed. What comes
out lies in memory as u does, [B, L] or [L, B], so that nobody around the scan has to copy.

Shapes: B batch, L length, I inner channels, N state, S segments, G checkpoints, K blocks of channels.
"""

from collections.abc import Callable
from functools import partial

import torch
import triton
from torch import Tensor

from megatron_blackmamba.ops.context import Chain
from megatron_blackmamba.ops.gradients import first_order
from megatron_blackmamba.ops.library import empty_like_rows, with_channels_contiguous
from megatron_blackmamba.ops.selective_scan import cuda_launch, triton_backward, triton_forward
from megatron_blackmamba.ops.selective_scan.inputs import Inputs
from megatron_blackmamba.ops.selective_scan.problem import Gradients, Kept, Problem
from megatron_blackmamba.ops.selective_scan.triton_tuning import Plan

CARRY_BLOCK = 256
SUM_BLOCK = 128
WARP = 32


def scan(
    inputs: Inputs,
    plan: Plan,
    chain: Chain | None = None,
    z_gradient: Callable[[Tensor], Tensor] | None = None,
    log_A: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the scan; `chain` replaces the initial state by the other parts' and gives the final state no gradient.

    z_gradient: Returns the tensor for the gradient of its argument, z.
    log_A: A_IN is log(-A), as Mamba keeps it.
    """
    return _Scan.apply(plan, chain, z_gradient, log_A, *inputs)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: Plan, chain: Chain | None, z_gradient, log_A: bool, *arguments):
        inputs = Inputs(*arguments)
        start = inputs.initial_state_BIN
        start_BNI = None if start is None else start.float().transpose(1, 2).contiguous()
        save = any(ctx.needs_input_grad)
        with torch.cuda.device_of(inputs.u_BLI):
            y, saved, raw_y, final_BNI = _run_forward(Problem.of(inputs, log_A), start_BNI, plan, save, chain)
        ctx.set_materialize_grads(False)
        ctx.softplus, ctx.plan, ctx.chain, ctx.z_gradient = inputs.delta_softplus, plan, chain, z_gradient
        ctx.log_A = log_A
        ctx.save_for_backward(*inputs._replace(delta_softplus=None, initial_state_BIN=None), saved, raw_y)
        return y, final_BNI.transpose(1, 2)

    @staticmethod
    @first_order
    def backward(ctx, dy, dfinal):
        *arguments, saved, raw_y = ctx.saved_tensors
        inputs = Inputs(*arguments)._replace(delta_softplus=ctx.softplus)
        dy = torch.zeros_like(inputs.u_BLI) if dy is None else dy
        dend_BNI = None if dfinal is None else dfinal.float().transpose(1, 2).contiguous()
        dz = None if inputs.z_BLI is None else (ctx.z_gradient or empty_like_rows)(inputs.z_BLI)
        kept = Kept(with_channels_contiguous(dy), saved, raw_y)
        problem, parameters = Problem.of(inputs, ctx.log_A), (inputs.A_IN, inputs.D_I, inputs.delta_bias_I)
        dA, dD, dbias = (
            None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in parameters
        )
        grads = _run_backward(problem, kept, dend_BNI, ctx.plan, ctx.chain, dz, (dA, dD, dbias))
        du, ddelta, dB, dC, dstart_BNI = grads
        needed = Inputs(*ctx.needs_input_grad[4:])
        return (
            None,
            None,
            None,
            None,
            *Inputs(
                du,
                ddelta,
                dA,
                dB.to(inputs.B_BLN.dtype),
                dC.to(inputs.C_BLN.dtype),
                D_I=dD,
                z_BLI=dz,
                delta_bias_I=dbias,
                delta_softplus=None,
                initial_state_BIN=dstart_BNI.transpose(1, 2) if needed.initial_state_BIN else None,
            ),
        )


def _run_forward(
    p: Problem, start_BNI: Tensor | None, plan: Plan, save: bool, chain: Chain | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Return y, the states that `plan` saves, with `plan.keep` y before the gate, and the final state."""
    B, L, I, N = p.sizes
    fp32 = {"device": p.u.device, "dtype": torch.float32}
    blocks, segments = triton.cdiv(I, plan.block), plan.segments(L)
    if segments > 1 or chain is not None:
        batch_strides, token_strides = _strides(u=p.u, delta=p.delta)
        ends_BSNI = torch.empty(B, segments, N, I, **fp32)
        decays_BSNI = torch.empty_like(ends_BSNI)
        triton_forward.segment_ends[(blocks, B, segments)](
            p.u, p.delta, p.A_NI, p.BC, p.or_u(p.bias), p.or_u(p.reset), ends_BSNI, decays_BSNI,
            L, *batch_strides, plan.segment if segments > 1 else L, **token_strides,
            I=I, N=N, BLOCK_I=plan.block, STEPS=plan.steps, num_warps=plan.block // WARP,
            **p.switches(plan.block, plan.steps, "EVEN", "SOFTPLUS", "HAS_BIAS", "HAS_RESET"),
        )  # fmt: skip
        if chain is not None:
            added_BNI = _carry(ends_BSNI.clone(), decays_BSNI, None, reverse=False)
            start_BNI = chain.start(decays_BSNI.prod(1), added_BNI)
        _carry(ends_BSNI, decays_BSNI, start_BNI, reverse=False)
        starts_BSNI = ends_BSNI
    else:
        starts_BSNI = start_BNI
    y = empty_like_rows(p.u)
    keep = plan.backward_steps if plan.keep else 0
    raw_y = empty_like_rows(p.u) if save and keep and p.z is not None else None
    final_BNI = torch.empty(B, N, I, **fp32)
    if plan.cuda:
        saved = cuda_launch.forward(p, plan, starts_BSNI, y, raw_y, final_BNI, save)
        return y, saved, raw_y, final_BNI
    batch_strides, token_strides = _strides(u=p.u, delta=p.delta, z=p.or_u(p.z), y=y)
    saved = None
    if save:
        dtype = torch.bfloat16 if keep and p.u.dtype == torch.bfloat16 else torch.float32
        saved = torch.empty(B, triton.cdiv(L, keep or plan.chunk), N, I, device=p.u.device, dtype=dtype)
    triton_forward.forward[(blocks, B, segments)](
        p.u, p.delta, p.or_u(p.z), p.A_NI, p.BC, p.or_u(p.D), p.or_u(p.bias), p.or_u(p.reset), p.or_u(starts_BSNI),
        y, p.or_u(raw_y), p.or_u(saved), final_BNI,
        L, *batch_strides, plan.segment if segments > 1 else L, **token_strides,
        I=I, N=N, BLOCK_I=plan.block, CHUNK=plan.chunk, STEPS=plan.steps, num_warps=plan.block // WARP,
        HAS_START=starts_BSNI is not None, SAVE=save, KEEP=keep, **p.switches(plan.block, plan.steps),
    )  # fmt: skip
    return y, saved, raw_y, final_BNI


def _run_backward(
    p: Problem,
    kept: Kept,
    dend_BNI: Tensor | None,
    plan: Plan,
    chain: Chain | None,
    dz: Tensor | None,
    parameters: tuple[Tensor | None, ...],
) -> tuple[Tensor, ...]:
    """Write the gradients of z, and of A, D and the bias, to the tensors given, and return the others."""
    B, L, I, N = p.sizes
    fp32 = {"device": p.u.device, "dtype": torch.float32}
    chunks = triton.cdiv(L, plan.backward_length(L))
    grads = Gradients(
        du=empty_like_rows(p.u),
        ddelta=empty_like_rows(p.u, p.delta.dtype),
        dz=dz,
        dBC=torch.empty(B, L, 2 * N, device=p.u.device, dtype=p.B.dtype if plan.cuda else torch.float32),
        dstart_BNI=torch.empty(B, N, I, **fp32),
        dA_BGNI=torch.empty(B, chunks, N, I, **fp32),
        dD_BGI=torch.empty(B, chunks, I, **fp32),
        dbias_BGI=torch.empty(B, chunks, I, **fp32),
    )
    for first in range(0, B, plan.group):
        last = min(first + plan.group, B)
        cut = slice(first, last)
        _backward_of_part(
            p.part(cut), kept.part(cut), None if dend_BNI is None else dend_BNI[cut],
            grads.part(cut), plan, None if chain is None else partial(chain.grad_end, sequences=cut),
        )  # fmt: skip
    dA, dD, dbias = parameters
    of_A, of_one = triton.cdiv(N * I, SUM_BLOCK), triton.cdiv(I, SUM_BLOCK)
    triton_backward.add_up[(of_A + of_one,)](
        grads.dA_BGNI, grads.dD_BGI, grads.dbias_BGI, p.A_IN, dA, p.or_u(dD), p.or_u(dbias), B * chunks, of_A,
        HAS_D=dD is not None, HAS_BIAS=dbias is not None, LOG_A=p.log_A, I=I, N=N, BLOCK=SUM_BLOCK, num_warps=4,
    )  # fmt: skip
    dB, dC = grads.dBC.split(N, dim=-1)
    return grads.du, grads.ddelta, dB, dC, grads.dstart_BNI


def _backward_of_part(
    p: Problem,
    kept: Kept,
    dend_BNI: Tensor | None,
    grads: Gradients,
    plan: Plan,
    grad_end: Callable[[Tensor], Tensor] | None,
) -> None:
    """Fill the gradients of some sequences."""
    B, L, I, N = p.sizes
    fp32 = {"device": p.u.device, "dtype": torch.float32}
    length, steps, dy = plan.backward_length(L), plan.backward_steps, kept.dy
    chunks = triton.cdiv(L, length)
    ends_BGNI = None if dend_BNI is None else dend_BNI[:, None]
    states_BTNI = kept.states if plan.keep else torch.empty(B, triton.cdiv(L, steps), N, I, **fp32)
    if chunks > 1 or grad_end is not None or not plan.keep:
        ends_BGNI = _ends_of_chunks(p, kept, states_BTNI, dend_BNI, grads, plan, grad_end)
    if plan.cuda:
        cuda_launch.backward(p, plan, kept, ends_BGNI, grads)
        return
    raw_y, dz = p.or_u(kept.raw_y), p.or_u(grads.dz if plan.keep else None)
    batch_strides, token_strides = _strides(u=p.u, delta=p.delta, z=p.or_u(p.z), dy=dy, dz=dz, raw=raw_y, du=grads.du)
    blocks = triton.cdiv(I, plan.backward_block)
    dBC_KBLM = torch.empty(blocks, B, L, 2 * N, **fp32)
    triton_backward.backward[(blocks, B, chunks)](
        p.u, p.delta, p.or_u(p.z), dy, p.A_NI, p.BC, p.or_u(p.D), p.or_u(p.bias), p.or_u(p.reset),
        p.or_u(ends_BGNI), states_BTNI, raw_y,
        grads.du, grads.ddelta, dz, grads.dA_BGNI, dBC_KBLM, grads.dD_BGI, grads.dbias_BGI, grads.dstart_BNI,
        L, *batch_strides, length, **token_strides,
        I=I, N=N, BLOCK_I=plan.backward_block, STEPS=steps, num_warps=plan.backward_block // WARP,
        KEPT=plan.keep, HAS_END=ends_BGNI is not None, **p.switches(plan.backward_block, steps),
    )  # fmt: skip
    torch.sum(dBC_KBLM, dim=0, out=grads.dBC)


def _ends_of_chunks(
    p: Problem,
    kept: Kept,
    states_BTNI: Tensor,
    dend_BNI: Tensor | None,
    grads: Gradients,
    plan: Plan,
    grad_end: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Return the gradient of the state at the end of each chunk. Unless states are kept, recompute them."""
    B, L, I, N = p.sizes
    length, steps, dy = plan.backward_length(L), plan.backward_steps, kept.dy
    chunks = triton.cdiv(L, length)
    parts_BGNI = torch.empty(B, chunks, N, I, dtype=torch.float32, device=p.u.device)
    decays_BGNI = grads.dA_BGNI  # they are spent when the gradient of A takes their place
    saved, states, dz = (p.u, p.u, p.u) if plan.keep else (kept.states, states_BTNI, p.or_u(grads.dz))
    batch_strides, token_strides = _strides(u=p.u, delta=p.delta, z=p.or_u(p.z), dy=dy, dz=dz)
    triton_backward.chunk_parts[(triton.cdiv(I, plan.block), B, chunks)](
        p.u, p.delta, p.or_u(p.z), dy, p.A_NI, p.BC, p.or_u(p.D), p.or_u(p.bias), p.or_u(p.reset), saved,
        parts_BGNI, decays_BGNI, states, dz, grads.dD_BGI, L, *batch_strides, **token_strides,
        I=I, N=N, BLOCK_I=plan.block, CHUNK=length, STEPS=steps, num_warps=plan.block // WARP, KEPT=plan.keep,
        **p.switches(plan.block, steps),
    )  # fmt: skip
    if grad_end is not None:
        dend_BNI = grad_end(_carry(parts_BGNI.clone(), decays_BGNI, None, reverse=True))
    _carry(parts_BGNI, decays_BGNI, dend_BNI, reverse=True, end_BNI=grads.dstart_BNI)
    return parts_BGNI


def _carry(
    parts_BSNI: Tensor,
    decays_BSNI: Tensor,
    start_BNI: Tensor | None,
    *,
    reverse: bool,
    end_BNI: Tensor | None = None,
) -> Tensor:
    B, S, N, I = parts_BSNI.shape
    if end_BNI is None:
        end_BNI = parts_BSNI.new_empty(B, N, I)
    triton_forward.carry[(triton.cdiv(N * I, CARRY_BLOCK), B)](
        parts_BSNI, decays_BSNI, end_BNI if start_BNI is None else start_BNI, end_BNI, S, N * I,
        BLOCK=CARRY_BLOCK, REVERSE=reverse, HAS_START=start_BNI is not None, num_warps=4,
    )  # fmt: skip
    return end_BNI


def _strides(**tensors: Tensor) -> tuple[list[int], dict[str, int]]:
    """Return strides between sequences as arguments, and strides between tokens as compile-time constants."""
    return [x.stride(0) for x in tensors.values()], {f"{name.upper()}_L": x.stride(1) for name, x in tensors.items()}
