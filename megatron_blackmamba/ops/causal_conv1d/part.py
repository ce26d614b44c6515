"""The causal convolution over one rank's part of sequences that are cut over a group (`ops/context.py`).

Shapes: B batch, L length of the part, I inner channels, K taps, W = K - 1 the window.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatron_blackmamba.ops.causal_conv1d import causal_conv1d, final_window
from megatron_blackmamba.ops.context import from_neighbour, sum_before
from megatron_blackmamba.ops.gradients import first_order


def causal_conv1d_part(
    x_BLI: Tensor,
    weight_IK: Tensor,
    bias_I: Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    reset_BL: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return y_BLI of this rank's part, with SiLU; arguments as for `causal_conv1d`.

    Parts shorter than the window must all have the same length.
    """
    if x_BLI.shape[1] < weight_IK.shape[1] - 1:
        window_BWI = _window_of_several(x_BLI, weight_IK, reset_BL, group)
        return _convolve(x_BLI, weight_IK, bias_I, window_BWI, reset_BL, backend)
    if torch.is_grad_enabled():
        return _ConvolvePart.apply(x_BLI, weight_IK, bias_I, reset_BL, group, backend)
    window_BWI = from_neighbour(_last(x_BLI, weight_IK, reset_BL), group, -1)
    return _convolve(x_BLI, weight_IK, bias_I, window_BWI, reset_BL, backend)


class _ConvolvePart(torch.autograd.Function):
    """Receives the last inputs of the part before, and sends their gradient back.

    Left to autograd, the gradient of the last inputs would become a tensor of the size of all of them.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, reset, group, backend):
        window = from_neighbour(_last(x, weight, reset), group, -1)
        leaves = [None if leaf is None else leaf.detach().requires_grad_() for leaf in (x, weight, bias, window)]
        with torch.enable_grad():
            y = _convolve(*leaves, reset, backend)
        ctx.group, ctx.graph = group, (leaves, reset, get_gradient_edge(y))
        return y.detach()

    @staticmethod
    @first_order
    def backward(ctx, grad_y):
        leaves, reset, y = ctx.graph
        ctx.graph = None  # or the inputs would live until the whole backward pass is over
        there = [leaf for leaf in leaves if leaf is not None]
        grad_x, grad_weight, *grad_bias, grad_window = torch.autograd.grad(y, there, grad_y)
        W = grad_window.shape[1]
        with torch.enable_grad():
            tail = leaves[0][:, -W:].detach().requires_grad_()
            sent = _last(tail, leaves[1], None if reset is None else reset[:, -W:])
        grad_x[:, -W:] += torch.autograd.grad(sent, tail, from_neighbour(grad_window, ctx.group, 1))[0]
        return grad_x, grad_weight, *(grad_bias or [None]), None, None, None


def _window_of_several(x_BLI: Tensor, weight_IK: Tensor, reset_BL: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """Return the window before this part, `[B, W, I]`, which reaches beyond the part before; it passes on gradients."""
    (B, L, _), W, before = x_BLI.shape, weight_IK.shape[1] - 1, group.rank() * x_BLI.shape[1]
    ended_B = x_BLI.new_zeros(B, dtype=torch.bool) if reset_BL is None else reset_BL.any(1)
    own_BLI = _last(x_BLI, weight_IK, reset_BL)[:, W - L :]
    placed_BTI = F.pad(own_BLI, (0, 0, before, (group.size() - 1) * L - before))  # its place in the whole sequence
    return F.pad(sum_before(placed_BTI, ended_B, group)[:, :before], (0, 0, W, 0))[:, before:]


def _last(x_BLI: Tensor, weight_IK: Tensor, reset_BL: Tensor | None) -> Tensor:
    return final_window(x_BLI, weight_IK.shape[1], reset_BL=reset_BL)


def _convolve(x_BLI, weight_IK, bias_I, window_BWI, reset_BL, backend: str) -> Tensor:
    y_BLI = causal_conv1d(x_BLI, weight_IK, bias_I, initial_window=window_BWI, reset_BL=reset_BL, backend=backend)
    assert isinstance(y_BLI, Tensor)
    return y_BLI
