"""A linear whose output is fp32 though its inputs are bf16: on a GPU the product is not rounded, and nothing is copied.

Shapes: T tokens, D inputs, E outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def fp32_linear(x: Tensor, weight_ED: Tensor, bias_E: Tensor | None, full: torch.dtype = torch.float32) -> Tensor:
    """Return `x @ weight.T`, plus the bias if there is one, in `full`, which is float64 for a float64 model."""
    if applies(x, weight_ED):
        return fp32_linear_and_input(x, weight_ED, bias_E)[0]
    return F.linear(*(None if t is None else t.to(full) for t in (x, weight_ED, bias_E)))  # type: ignore[arg-type]


def fp32_linear_and_input(x: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return also x, for its other readers: the product that makes the gradient adds theirs to it."""
    logits_TE, x_TD = Fp32Product.apply(x.flatten(0, -2), weight_ED)
    logits = logits_TE.view(*x.shape[:-1], -1)
    return logits if bias_E is None else logits + bias_E, x_TD.view_as(x)


def applies(x: Tensor, weight_ED: Tensor) -> bool:
    """Return whether the product can read bf16 and write fp32."""
    return x.is_cuda and x.dtype == weight_ED.dtype == torch.bfloat16 and hasattr(torch.ops.aten.mm, "dtype")


class Fp32Product(torch.autograd.Function):
    """A matrix product in fp32 whose gradients are bf16 products, like the gradients of every other linear layer."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_TD, weight_ED)
        return fp32_product(x_TD, weight_ED.t()), x_TD.view_as(x_TD)

    @staticmethod
    def backward(ctx, grad_TE: Tensor | None, grad_TD: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        if grad_TE is None:
            return grad_TD, None
        rounded_TE = grad_TE.to(x_TD.dtype)
        grad_x_TD = rounded_TE @ weight_ED if grad_TD is None else torch.addmm(grad_TD, rounded_TE, weight_ED)
        return grad_x_TD, fp32_product(rounded_TE.t(), x_TD).to(weight_ED.dtype)


def fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two matrices in fp32, which on a GPU is never rounded to bf16."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
