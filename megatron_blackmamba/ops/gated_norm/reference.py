"""RMS norm of gated activations, group by group of channels, as between Mamba-2's scan and its output projection.

The backward pass keeps the inputs and one number a group.

Shapes: I channels, G groups, C = I / G channels of a group.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops.arguments import require_floats
from megatron_blackmamba.ops.gradients import first_order


def gated_rms_norm(x: Tensor, gate: Tensor, weight_I: Tensor, groups: int, eps: float) -> Tensor:
    """Return u / sqrt(mean(u²) + eps) * weight, with u = x * silu(gate), in x's dtype; a mean for each group."""
    require_floats("gated_rms_norm", x=x, gate=gate, weight=weight_I)
    if x.shape != gate.shape or x.shape[-1:] != weight_I.shape or weight_I.shape[0] % groups:
        raise ValueError(
            f"gated_rms_norm: x is {tuple(x.shape)}, gate {tuple(gate.shape)}, weight {tuple(weight_I.shape)} in"
            f" {groups} groups. Give x and gate one shape, whose last size is the weight's and divisible by the groups."
        )
    return _GatedRmsNorm.apply(x, gate, weight_I, groups, eps)


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, groups, eps):
        compute = torch.promote_types(x.dtype, torch.float32)
        u_GC = (x.to(compute) * F.silu(gate.to(compute))).unflatten(-1, (groups, -1))
        scale_G1 = torch.rsqrt(u_GC.square().mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(x, gate, weight, scale_G1)
        return ((u_GC * scale_G1).flatten(-2) * weight.to(compute)).to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx, grad_y):
        x, gate, weight, scale_G1 = ctx.saved_tensors
        compute = scale_G1.dtype
        gate_, grad_y = gate.to(compute), grad_y.to(compute)
        silu = F.silu(gate_)
        normal_GC = (x.to(compute) * silu).unflatten(-1, scale_G1.shape[-2:-1] + (-1,)) * scale_G1
        grad_weight = (grad_y * normal_GC.flatten(-2)).flatten(0, -2).sum(0)
        grad_GC = (grad_y * weight.to(compute)).unflatten(-1, normal_GC.shape[-2:])
        grad_GC = (grad_GC - normal_GC * (grad_GC * normal_GC).mean(dim=-1, keepdim=True)) * scale_G1
        grad_u = grad_GC.flatten(-2)
        grad_gate = torch.ops.aten.silu_backward(grad_u * x.to(compute), gate_)
        return (grad_u * silu).to(x.dtype), grad_gate.to(gate.dtype), grad_weight.to(weight.dtype), None, None
