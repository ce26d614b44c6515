"""Sinkhorn routing: choose the expert of each token so that all experts get about the same number of tokens.

The transport plan pi follows the logits and gives every token weight 1 and every expert weight T / E (paper, appendix
"Sinkhorn MoE Routing Modifications"). It has the form pi = exp(X) * column_E * row_T. The choice of a token, argmax
over E, does not depend on row_T, so only column_E is computed.

Shapes: T tokens, E experts, K experts of a token.
"""

import math
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops.arguments import require_dimensions, require_floats, require_shape
from megatron_blackmamba.ops.sinkhorn.inputs import Inputs

BACKENDS = ("triton", "cpp", "reference")  # best first, each where it applies
MOST_ITERATIONS, LOAD_BOUND = 16, 1.2
"""Of "auto": most iterations, and the multiple of the mean share of the plan that ends them if no expert has more."""


@torch.no_grad()
def sinkhorn_choice(
    logits_TE: Tensor,
    *,
    top_k: int = 1,
    iterations: int | str = 1,
    temperature: float = 2.0,
    start: str = "balanced",
    group: dist.ProcessGroup | None = None,
    tokens_E: Tensor | None = None,
    bias_E: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return the expert of each token, `[T]` int64, or its K experts, `[T, K]`, if `top_k` is above 1.

    The host never waits for the device. Logits must be finite: if one is not, any expert may be chosen for any token.

    Args:
        iterations: A number, or "auto": after the first, as many as give no expert more than LOAD_BOUND times the mean
            share of the plan, but at most MOST_ITERATIONS. The device decides.
        top_k: Experts per token: the K largest entries in the token's row of the plan.
        start: "balanced" first normalises each expert over the tokens; at the logit scales of training, one iteration
            is then enough. "uniform" is the textbook start.
        group: Ranks whose tokens are balanced together, as if one rank had them all. They exchange E numbers per
            iteration.
        tokens_E: Counts to which the tokens of each expert are added; int64 and contiguous.
        bias_E: Where the bias is added with which the plan chooses: the choice is the largest sum of logit and bias.
            Its mean over the experts is zero.
    """
    require_floats("sinkhorn_choice", logits=logits_TE)
    if start not in ("balanced", "uniform"):
        raise ValueError(f'start must be "balanced" or "uniform", not {start!r}')
    require_dimensions("sinkhorn_choice", "logits", logits_TE, 2)
    experts = logits_TE.shape[1]
    require_shape("sinkhorn_choice", "tokens_E", tokens_E, experts)
    require_shape("sinkhorn_choice", "bias_E", bias_E, experts)
    if tokens_E is not None and not (tokens_E.dtype == torch.int64 and tokens_E.is_contiguous()):
        raise ValueError(
            f"tokens_E must be int64 and contiguous, not {tokens_E.dtype} with strides {tokens_E.stride()}"
        )
    if not (isinstance(top_k, int) and 1 <= top_k <= experts):
        raise ValueError(f"top_k must be a whole number from 1 to the number of experts, {experts}; not {top_k!r}")
    if not (iterations == "auto" or (isinstance(iterations, int) and iterations >= 0)):
        raise ValueError(f'iterations must be a whole number from 0 on, not {iterations!r}; or "auto"')
    if not (isinstance(temperature, Real) and math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be finite and above 0, not {temperature!r}")
    if group is None and not len(logits_TE):  # in a group it takes part in the sums
        return torch.empty((0,) if top_k == 1 else (0, top_k), dtype=torch.int64, device=logits_TE.device)
    most, bound = (MOST_ITERATIONS, LOAD_BOUND) if iterations == "auto" else (int(iterations), 0.0)
    inputs = Inputs(logits_TE, most, temperature, start, group, bound)
    chosen = backends.choose(__name__, BACKENDS, backend, inputs)
    if top_k == 1:
        found_E = None if bias_E is None else torch.zeros_like(bias_E)
        choice = chosen.choice(inputs, tokens_E, found_E)
    else:
        found_E = chosen.bias(inputs)
        choice = (logits_TE + found_E).topk(top_k, dim=1).indices
        if tokens_E is not None:
            tokens_E.scatter_add_(0, choice.flatten(), torch.ones_like(choice.flatten()))
    if bias_E is not None:
        bias_E += found_E - found_E.mean()  # the backends find it up to a constant
    return choice


def load_imbalance(choice: Tensor, experts: int) -> Tensor:
    """Return the tokens of the busiest expert divided by the mean: 1.0 is balanced, `experts` is collapsed.

    choice: The result of `sinkhorn_choice`, `[T]` or `[T, K]`. Without a token the answer is NaN.
    """
    tokens_E = torch.bincount(choice.flatten(), minlength=experts)
    if len(tokens_E) > experts:
        raise ValueError(f"load_imbalance: a token chose expert {len(tokens_E) - 1}, and the {experts} start at 0.")
    return tokens_E.max() / tokens_E.float().mean()


def available_backends() -> dict[str, str | None]:
    """Return the backends, each with None if this machine can use it, or with the reason why not."""
    return backends.available(__name__, BACKENDS)
