"""The products of all experts at once, by PyTorch's grouped_mm."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops.backends import FP32_OR_BF16, Takes
from megatron_blackmamba.ops.matvec import bf16_products

TAKES = Takes(None, FP32_OR_BF16)
ROW_ALIGNMENT = 16  # bytes, which grouped_mm asks of every row


def unavailable() -> str | None:
    """Return why it is not used here. Before it was public, it failed on the GPU for an expert without tokens."""
    if hasattr(F, "grouped_mm"):
        return None
    return f"torch {torch.__version__} lacks grouped_mm (torch.nn.functional, from 2.10 on)"


def smallest(device: str) -> None:
    """Multiply by three experts, of which one has no tokens: its gradient is zero, whatever its memory held before."""
    x_TD = torch.ones(3, 16, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight_EDO = torch.ones(3, 16, 16, dtype=torch.bfloat16, device=device, requires_grad=True)
    ends_E = torch.tensor([1, 1, 3], dtype=torch.int32, device=device)
    y_TO = F.grouped_mm(x_TD, weight_EDO, offs=ends_E)
    torch.full_like(weight_EDO, float("nan"))  # freed at once, for the gradient to find
    gradients = torch.autograd.grad(y_TO, (x_TD, weight_EDO), torch.ones_like(y_TO))
    expected: tuple[Any, ...] = (16, 16, torch.tensor([1, 0, 2], device=device).view(3, 1, 1))
    if not all(bool(torch.eq(found, wanted).all()) for found, wanted in zip((y_TO, *gradients), expected, strict=True)):
        raise ArithmeticError("its products with an expert without tokens are wrong")


def unsupported(x_TD: Tensor, weight_EOD: Tensor) -> str | None:
    if not len(x_TD):
        return "there are no tokens, for which it has no backward pass"
    if x_TD.is_cuda and x_TD.dtype != torch.bfloat16:
        return f"{x_TD.dtype} on {x_TD.device.type}"
    if x_TD.is_cpu and x_TD.dtype == torch.bfloat16 and not torch.is_grad_enabled() and not bf16_products():
        return "this processor has no bf16 products, and without gradients `product` is faster"
    for size in weight_EOD.shape[1:]:
        if size * x_TD.element_size() % ROW_ALIGNMENT:
            return f"rows of {size} {x_TD.dtype} are not a multiple of {ROW_ALIGNMENT} bytes"
    return None


def grouped_linear(x_TD: Tensor, tokens_per_expert_E: Tensor, weight_EOD: Tensor, ends_E: Tensor | None) -> Tensor:
    ends_E = ends_of(tokens_per_expert_E, x_TD, ends_E)
    y_TO = F.grouped_mm(x_TD.contiguous(), weight_EOD.contiguous().mT, offs=ends_E)
    if y_TO.requires_grad:
        y_TO.register_hook(torch.Tensor.contiguous)  # its backward refuses an expanded gradient
    return y_TO


def ends_of(tokens_per_expert_E: Tensor, x_TD: Tensor, known_E: Tensor | None) -> Tensor:
    """Return the sums of the first tokens per expert, in int32."""
    return tokens_per_expert_E.to(x_TD.device).cumsum(0, dtype=torch.int32) if known_E is None else known_E
