"""RMS norm with a SiLU gate as PyTorch's operations, any dtype and device.

Shapes: I channels, G groups, C = I / G channels of a group.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops.gradients import first_order


def gated_rms_norm(x: Tensor, gate: Tensor, weight_I: Tensor, groups: int, eps: float, norm_first: bool) -> Tensor:
    return _GatedRmsNorm.apply(x, gate, weight_I, groups, eps, norm_first)


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, groups, eps, norm_first):
        compute = torch.promote_types(x.dtype, torch.float32)
        silu = F.silu(gate.to(compute))
        u_GC = (x.to(compute) if norm_first else x.to(compute) * silu).unflatten(-1, (groups, -1))
        scale_G1 = torch.rsqrt(u_GC.square().mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(x, gate, weight, scale_G1)
        ctx.norm_first = norm_first
        y = (u_GC * scale_G1).flatten(-2) * weight.to(compute)
        return (y * silu if norm_first else y).to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx, grad_y):
        x, gate, weight, scale_G1 = ctx.saved_tensors
        compute = scale_G1.dtype
        x_, gate_, grad_y, weight_ = (t.to(compute) for t in (x, gate, grad_y, weight))
        silu = F.silu(gate_)
        grad = grad_y * silu if ctx.norm_first else grad_y
        u = x_ if ctx.norm_first else x_ * silu
        normal_GC = u.unflatten(-1, scale_G1.shape[-2:-1] + (-1,)) * scale_G1
        grad_weight = (grad * normal_GC.flatten(-2)).flatten(0, -2).sum(0)
        grad_GC = (grad * weight_).unflatten(-1, normal_GC.shape[-2:])
        grad_GC = (grad_GC - normal_GC * (grad_GC * normal_GC).mean(dim=-1, keepdim=True)) * scale_G1
        grad_u = grad_GC.flatten(-2)
        grad_silu = grad_y * normal_GC.flatten(-2) * weight_ if ctx.norm_first else grad_u * x_
        grad_gate = torch.ops.aten.silu_backward(grad_silu, gate_).to(gate.dtype)
        grad_x = (grad_u if ctx.norm_first else grad_u * silu).to(x.dtype)
        return grad_x, grad_gate, grad_weight.to(weight.dtype), None, None, None
