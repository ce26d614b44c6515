"""The cross entropy of each token whose logits several ranks hold, a part of the vocabulary each, with a z-loss.

Plain PyTorch, in float64 too, and with one rank also what runs without a kernel. Without a z-loss megatron-core's own
function does this.

Shapes: S sequence, B batch, V vocabulary of this rank.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_blackmamba.ops.gradients import first_order


def split_cross_entropy(
    logits_SBV: Tensor, labels_SB: Tensor, group: dist.ProcessGroup, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and the logarithm of its sum of exponentials, both in at least fp32.

    The gradient of a loss is that of loss + z_loss * log_sum². The second result has no gradient.
    """
    return _SplitCrossEntropy.apply(logits_SBV, labels_SB, group, z_loss)


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_SBV, labels_SB, group, z_loss):
        x_SBV = logits_SBV.to(torch.promote_types(logits_SBV.dtype, torch.float32))
        largest_SB1 = _reduced(x_SBV.amax(-1, keepdim=True), group, dist.ReduceOp.MAX)
        x_SBV = x_SBV - largest_SB1
        own_SB1 = labels_SB[..., None] - group.rank() * x_SBV.shape[-1]
        here_SB1 = (own_SB1 >= 0) & (own_SB1 < x_SBV.shape[-1])
        own_SB1 = own_SB1.where(here_SB1, 0)
        of_label_SB1 = _reduced(x_SBV.gather(-1, own_SB1) * here_SB1, group, dist.ReduceOp.SUM)
        softmax_SBV = x_SBV.exp_()
        sum_SB1 = _reduced(softmax_SBV.sum(-1, keepdim=True), group, dist.ReduceOp.SUM)
        softmax_SBV /= sum_SB1
        loss_SB = (sum_SB1.log() - of_label_SB1)[..., 0]
        log_sum_SB = (sum_SB1.log() + largest_SB1)[..., 0]
        ctx.save_for_backward(softmax_SBV, own_SB1, here_SB1, log_sum_SB)
        ctx.z_loss, ctx.dtype = z_loss, logits_SBV.dtype
        ctx.mark_non_differentiable(log_sum_SB)
        ctx.set_materialize_grads(False)  # the second result has none
        return loss_SB, log_sum_SB

    @staticmethod
    @first_order
    def backward(ctx, grad_SB, _):
        softmax_SBV, own_SB1, here_SB1, log_sum_SB = ctx.saved_tensors
        grad_SB1 = grad_SB[..., None]
        grad_SBV = softmax_SBV * (grad_SB1 * (1 + 2 * ctx.z_loss * log_sum_SB[..., None]))
        grad_SBV.scatter_add_(-1, own_SB1, -grad_SB1 * here_SB1)
        return grad_SBV.to(ctx.dtype), None, None, None


def _reduced(x: Tensor, group: dist.ProcessGroup, how: dist.ReduceOp) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(x, how, group=group)
    return x
