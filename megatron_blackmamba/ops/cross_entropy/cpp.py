"""The cross entropy of each token over a whole vocabulary in C++ (csrc/cross_entropy.cpp).

Shapes: T tokens, V vocabulary.
"""

import torch
from torch import Tensor

from megatron_blackmamba.ops import library
from megatron_blackmamba.ops.backends import FP32_OR_BF16, Takes
from megatron_blackmamba.ops.gradients import first_order

TAKES = Takes("cpu", FP32_OR_BF16)


def cross_entropy_and_log_sum(logits_TV: Tensor, labels_T: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    return _CrossEntropy.apply(logits_TV, labels_T, z_loss)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, z_loss):
        logits, labels = logits.contiguous(), labels.contiguous()
        low, high = labels.aminmax() if len(labels) else (0, 0)
        if low < 0 or high >= logits.shape[1]:
            raise IndexError(f"labels from {low} to {high}, where the vocabulary has {logits.shape[1]} entries")
        loss, log_sum = logits.new_empty((2, len(labels)), dtype=torch.float32)
        library.call("cross_entropy_forward", _arguments(logits, labels, log_sum, loss=loss))
        ctx.save_for_backward(logits, labels, log_sum)
        ctx.overwritten, ctx.z_loss = False, z_loss
        ctx.mark_non_differentiable(log_sum)
        ctx.set_materialize_grads(False)  # the second result has none
        return loss, log_sum

    @staticmethod
    @first_order
    def backward(ctx, grad_loss, _):
        if ctx.overwritten:
            raise RuntimeError("cross_entropy: its gradient overwrites the logits, so backward runs only once")
        ctx.overwritten = True
        logits, labels, log_sum = ctx.saved_tensors
        of_sum = 2 * ctx.z_loss * log_sum * grad_loss if ctx.z_loss else None
        gradients = {"grad_loss": (grad_loss if of_sum is None else grad_loss + of_sum).contiguous()}
        arguments = _arguments(logits, labels, log_sum, **gradients, grad_logits=logits)
        library.call("cross_entropy_backward", arguments)
        if of_sum is not None:  # the kernel has subtracted it from the label's share
            logits.scatter_add_(1, labels[:, None], of_sum.to(logits.dtype)[:, None])
        return logits, None, None


def _arguments(logits, labels, log_sum, **others):
    (T, V), is_bf16 = logits.shape, logits.dtype == torch.bfloat16
    return _Arguments(T=T, V=V, is_bf16=is_bf16, logits=logits, labels=labels, log_sum=log_sum, **others)


class _Arguments(library.Arguments):
    """struct CrossEntropy of csrc/cross_entropy.h."""

    _fields_ = library.fields("int64 T V is_bf16 threads; pointer logits labels loss log_sum grad_loss grad_logits")
