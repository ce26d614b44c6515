"""A linear whose output is fp32 though its inputs are bf16: on a GPU the product is not rounded, and nothing is copied.

Shapes: T tokens, D inputs, E outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def fp32_linear(x: Tensor, weight_ED: Tensor, bias_E: Tensor, full: torch.dtype = torch.float32) -> Tensor:
    """Return `x @ weight.T + bias` in `full`, which is float64 for a float64 model."""
    if applies(x, weight_ED):
        logits_TE: Tensor = Fp32Product.apply(x.flatten(0, -2), weight_ED)
        return logits_TE.view(*x.shape[:-1], -1) + bias_E.to(full)
    return F.linear(*(t.to(full) for t in (x, weight_ED, bias_E)))


def applies(x: Tensor, weight_ED: Tensor) -> bool:
    """Return whether the product can read bf16 and write fp32."""
    return x.is_cuda and x.dtype == weight_ED.dtype == torch.bfloat16 and hasattr(torch.ops.aten.mm, "dtype")


class Fp32Product(torch.autograd.Function):
    """A matrix product in fp32 whose gradients are bf16 products, like the gradients of every other linear layer."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        return _mm(x_TD, weight_ED.t())

    @staticmethod
    def backward(ctx, grad_TE: Tensor) -> tuple[Tensor, Tensor]:
        x_TD, weight_ED = ctx.saved_tensors
        rounded_TE = grad_TE.to(x_TD.dtype)
        return rounded_TE @ weight_ED, _mm(rounded_TE.t(), x_TD).to(weight_ED.dtype)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
