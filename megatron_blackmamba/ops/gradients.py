"""Gradients that cannot be differentiated again."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Have a backward pass refuse `create_graph=True`.

    PyTorch's `once_differentiable` refuses later, and only if the incoming gradient depends on the inputs. Otherwise
    second derivatives would silently lack the terms of this function.
    """

    @wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            name = type(ctx).__qualname__.removesuffix("Backward").lstrip("_")
            raise RuntimeError(
                f"{backward.__module__} ({name}) has no second derivatives. Leave out create_graph=True, or use an op's"
                ' backend="reference" where it has one.'
            )
        return backward(ctx, *gradients)

    return once
