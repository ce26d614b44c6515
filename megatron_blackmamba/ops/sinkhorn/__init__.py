"""Sinkhorn routing: which expert each token goes to, so that all experts get about the same number of tokens.

The router asks for the plan pi that follows the logits and gives every token weight 1 and every expert T / E
(paper, appendix "Sinkhorn MoE Routing Modifications"). It has the form pi = exp(X) * column_E * row_T, and the choice
of a token, argmax over E, does not depend on row_T: only column_E has to be found.

Shapes: T tokens, E experts, K experts of a token.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops.dtypes import require_floats

__all__ = ["available_backends", "load_imbalance", "sinkhorn_choice"]

BACKENDS = ("triton", "cpu", "reference")  # best first, each where it applies


@torch.no_grad()
def sinkhorn_choice(
    logits_TE: Tensor,
    *,
    top_k: int = 1,
    iterations: int = 1,
    temperature: float = 2.0,
    start: str = "balanced",
    group: dist.ProcessGroup | None = None,
    tokens_E: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return the expert of each token, `[T]`, int64. The number of iterations is fixed: nothing waits for the device.

    top_k: with more than one, the experts of each token, `[T, K]`: the K largest entries of its row of the plan, whose
    columns then add up to K * T / E.
    start: "balanced" normalises each expert over the tokens first, which makes one iteration enough at the logit scales
    of training; "uniform" is the textbook start.
    group: ranks whose tokens are balanced together. They exchange E numbers an iteration, and the result is that of one
    rank holding all the tokens.
    tokens_E: the tokens of each expert are added to it; int64 and contiguous.
    """
    require_floats("sinkhorn_choice", logits=logits_TE)
    if start not in ("balanced", "uniform"):
        raise ValueError(f'start is "balanced" or "uniform", not {start!r}')
    if tokens_E is not None and not (tokens_E.dtype == torch.int64 and tokens_E.is_contiguous()):
        raise ValueError(f"tokens_E is int64 and contiguous, not {tokens_E.dtype} with strides {tokens_E.stride()}")
    if not 1 <= top_k <= logits_TE.shape[1]:
        raise ValueError(f"top_k is 1 to the number of experts, {logits_TE.shape[1]}; not {top_k}")
    chosen = backends.choose(__name__, BACKENDS, backend, logits_TE, group)
    if top_k == 1:
        return chosen.choice(logits_TE, iterations, temperature, start, group, tokens_E)
    X_TE = chosen.plan(logits_TE, iterations, temperature, start, group)
    choice_TK = X_TE.topk(top_k, dim=1).indices
    if tokens_E is not None:
        tokens_E.scatter_add_(0, choice_TK.flatten(), torch.ones_like(choice_TK.flatten()))
    return choice_TK


def load_imbalance(choice_T: Tensor, experts: int) -> Tensor:
    """Tokens of the busiest expert over the mean: 1.0 is perfect balance, `experts` is collapse."""
    tokens_E = torch.bincount(choice_T, minlength=experts)
    return tokens_E.max() / tokens_E.float().mean()


def available_backends() -> dict[str, str | None]:
    """Name -> None where this machine can use it, else the reason why not."""
    return backends.available(__name__, BACKENDS)
