"""Sinkhorn routing in PyTorch, on any device and over any process group.

Shapes: T tokens, E experts. Experts come first: T is long and contiguous, E is 8.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_blackmamba.ops.sinkhorn.inputs import Inputs

# An iteration changes the ratio of two experts' factors by at most T * E. After this many, the factors move into the
# exponents, long before they could overflow.
ITERATIONS_PER_REBASE = 4
LOWEST = -1e38  # the largest logit where a rank has no tokens
SMALLEST_EXPONENT = -80.0  # nothing below can matter before the next rebase, and denormal numbers are slow


def choice(inputs: Inputs, tokens_E: Tensor | None = None, bias_E: Tensor | None = None) -> Tensor:
    X_ET, column_E = _factors(inputs)
    if bias_E is not None:
        bias_E += _bias(inputs, X_ET, column_E)
    K_ET = _kernel(X_ET)
    K_ET *= column_E[:, None]
    choice_T = K_ET.max(dim=0).indices  # argmax over a leading dimension is 4x slower on CPUs
    if tokens_E is not None:
        tokens_E.scatter_add_(0, choice_T, torch.ones_like(choice_T))  # bincount would wait for the device
    return choice_T


def bias(inputs: Inputs) -> Tensor:
    """Return what the plan adds to the logits of each expert, up to a constant."""
    return _bias(inputs, *_factors(inputs))


def _bias(inputs: Inputs, X_ET: Tensor, column_E: Tensor) -> Tensor:
    """Return it by the first token: all tokens have the same. Without a token it is zero."""
    if not len(inputs.logits_TE):
        return torch.zeros_like(column_E)
    return (X_ET[:, 0] + column_E.log()) / inputs.temperature - inputs.logits_TE[0].to(X_ET.dtype)


def _factors(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return X, and the experts' factors that the plan has beside exp(X)."""
    logits_TE, iterations, temperature, start, group, bound = inputs
    X_ET = logits_TE.t().to(torch.promote_types(logits_TE.dtype, torch.float32)).contiguous() * temperature
    bounds = [0.0] * min(iterations, 1) + [bound] * (iterations - 1)  # one for each iteration
    if start == "uniform" and iterations > 0:
        # Its first iteration is: normalise the tokens, then the experts. The rest goes on as from the balanced start.
        X_ET = torch.log_softmax(X_ET, dim=0)
        del bounds[0]
        start = "balanced"
    if start == "balanced":
        X_ET -= _logsumexp_over_tokens(X_ET, group)[:, None]
    while len(bounds) > ITERATIONS_PER_REBASE:
        X_ET += _column_factors(_kernel(X_ET), bounds[:ITERATIONS_PER_REBASE], group).log()[:, None]
        del bounds[:ITERATIONS_PER_REBASE]
    return X_ET, _column_factors(_kernel(X_ET), bounds, group)


def _kernel(X_ET: Tensor) -> Tensor:
    """Return exp(X), scaled so that each token's largest entry is 1: nothing overflows, no token sums to zero."""
    return (X_ET - X_ET.amax(dim=0)).clamp_(min=SMALLEST_EXPONENT).exp_()


def _column_factors(K_ET: Tensor, bounds: list[float], group: dist.ProcessGroup | None) -> Tensor:
    column_E = K_ET.new_ones(len(K_ET))
    for bound in bounds:
        row_T = 1.0 / (column_E @ K_ET)
        sums_E = _sum_over_group(K_ET @ row_T, group)
        next_E = 1.0 / sums_E
        next_E /= next_E.amax()  # only ratios matter; left alone, it shrinks by T / E each time until it is zero
        if bound:
            load_E = column_E * sums_E
            next_E = torch.where(load_E.amax() <= bound * load_E.mean(), column_E, next_E)
        column_E = next_E
    return column_E


def _logsumexp_over_tokens(X_ET: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    largest_E = X_ET.amax(dim=1) if X_ET.shape[1] else X_ET.new_full((len(X_ET),), LOWEST)
    if group is not None:
        dist.all_reduce(largest_E, op=dist.ReduceOp.MAX, group=group)
    return (
        largest_E
        + _sum_over_group((X_ET - largest_E[:, None]).clamp_(min=SMALLEST_EXPONENT).exp_().sum(dim=1), group).log()
    )


def _sum_over_group(x_E: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(x_E, group=group)
    return x_E
