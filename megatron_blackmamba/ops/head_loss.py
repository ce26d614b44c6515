"""The loss of each token from the hidden states: the product with the vocabulary and its cross entropy, on GPUs.

One kernel computes the losses and overwrites the logits by softmax minus one-hot; a soft cap and the gradient of a
z-loss are in it. The backward pass multiplies the
hidden states and their gradients by the gradient of each loss, so nothing reads or writes the logits once more. The
tokens are cut into chunks, so that no tensor of logits has more elements than 32-bit indices reach.

Shapes: T tokens, D model, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.ops import backends, cross_entropy
from megatron_blackmamba.ops.fp32_linear import fp32_product
from megatron_blackmamba.ops.gradients import first_order

MOST_LOGITS = 2**31 - 1
"""Elements of a chunk's logits while they are kept for the backward pass."""
TOKENS_UNKEPT = 8192
"""Tokens of a chunk where no gradient is needed, and the logits are freed at once."""


def applies(x: Tensor, weight_VD: Tensor) -> bool:
    """Return whether the kernel takes these tensors."""
    return x.dtype == weight_VD.dtype and _kernel_for(x) is not None


def _kernel_for(x: Tensor) -> Any:
    return backends.find(cross_entropy.__name__, "triton", x)


def head_loss(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    """Return the fp32 loss of each token."""
    return head_loss_and_log_sum(x_TD, weight_VD, labels_T)[0]


def head_loss_and_log_sum(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, z_loss: float = 0.0, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the fp32 loss of each token, and the logarithm of its sum of exponentials.

    The gradient of a loss is that of loss + z_loss * log_sum². The second result has no gradient.

    softcap: The logits are softcap * tanh(product / softcap).
    """
    inputs = x_TD.contiguous(), weight_VD, labels_T.contiguous()
    return _HeadLoss.apply(*inputs, torch.is_grad_enabled(), z_loss, softcap)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, weight_VD, labels_T, differentiate, z_loss, softcap):
        kernel: Any = _kernel_for(x_TD)
        size = max(1, MOST_LOGITS // len(weight_VD)) if differentiate else TOKENS_UNKEPT
        losses, log_sums, gradients = [], [], []
        for x, labels in zip(x_TD.split(size), labels_T.split(size), strict=True):
            logits_TV = x @ weight_VD.t()
            loss, log_sum = kernel.losses_of(logits_TV, labels, differentiate, z_loss, softcap)
            losses.append(loss)
            log_sums.append(log_sum)
            if differentiate:
                gradients.append(logits_TV)
            del logits_TV
        ctx.save_for_backward(x_TD, weight_VD, *gradients)
        loss_T, log_sum_T = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (losses, log_sums))
        ctx.mark_non_differentiable(log_sum_T)
        ctx.set_materialize_grads(False)  # the second result has none
        return loss_T, log_sum_T

    @staticmethod
    @first_order
    def backward(ctx, grad_T, _):
        x_TD, weight_VD, *gradients = ctx.saved_tensors
        # Divided by the largest, equal gradients are 1, and their product with bf16 numbers is exact.
        largest = grad_T.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
        relative_T1 = (grad_T / largest)[:, None]
        sizes = [len(gradient) for gradient in gradients]
        grad_x, grad_weight = [], None
        for x, relative, gradient_TV in zip(x_TD.split(sizes), relative_T1.split(sizes), gradients, strict=True):
            grad_x.append(_scaled(gradient_TV @ weight_VD, relative * largest))
            part = fp32_product(gradient_TV.t(), _scaled(x, relative))
            grad_weight = part if grad_weight is None else grad_weight.add_(part)
        grad_x_TD = grad_x[0] if len(grad_x) == 1 else torch.cat(grad_x)
        return grad_x_TD, torch.mul(grad_weight, largest, out=torch.empty_like(weight_VD)), None, None, None, None


def _scaled(x_TD: Tensor, factor_T1: Tensor) -> Tensor:
    """Return the product in x's dtype, computed in fp32 by one kernel."""
    return torch.mul(x_TD, factor_T1, out=torch.empty_like(x_TD))
