"""How many iterations Sinkhorn takes, by which rule: for looking into the method, not for training.

It works in the log domain and float64, so its answers are those of the definition at any scale of the logits.

Shapes: T tokens, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_blackmamba.ops.dtypes import require_floats

RULES = {"marginals": 1e-3, "absolute": 1e-4}  # and their usual tolerances


@dataclass(frozen=True)
class Study:
    iterations: int
    converged: bool
    marginal_error: float  # largest relative distance of an expert's weight in the plan from T / E
    load_imbalance: float  # tokens of the busiest expert over the mean, when each token takes its best expert
    choice_T: Tensor


@torch.no_grad()
def study(
    logits_TE: Tensor,
    *,
    rule: str = "marginals",
    tolerance: float | None = None,
    max_iterations: int = 10_000,
    temperature: float = 2.0,
    start: str = "balanced",
) -> Study:
    """Iterate until the rule is satisfied.

    rule "marginals": with every token at weight 1, each expert's weight is within tolerance x T / E of T / E. The scale
    of the factors plays no role.
    rule "absolute": the experts' factors change by at most the tolerance, on average. This is what Megatron-core's loop
    and the paper test (tokens at weight 1 / T, experts at 1 / E). The balanced start makes the factors themselves about
    1e-5, so that the rule is satisfied at once, whatever the plan.
    """
    require_floats("study", logits=logits_TE)
    if rule not in RULES:
        raise ValueError(f"rule is one of {', '.join(RULES)}, not {rule!r}")
    if start not in ("balanced", "uniform"):
        raise ValueError(f'start is "balanced" or "uniform", not {start!r}')
    tolerance = RULES[rule] if tolerance is None else tolerance
    X_TE = logits_TE.double() * temperature
    T, E = X_TE.shape
    log_T, log_E = torch.tensor([T, E], dtype=torch.float64).log()
    column_E = -torch.logsumexp(X_TE, 0) - log_E if start == "balanced" else torch.zeros_like(X_TE[0])

    converged, iterations = False, 0
    while not converged and iterations < max_iterations:
        row_T = -torch.logsumexp(X_TE + column_E, 1) - log_T
        previous_E, column_E = column_E, -torch.logsumexp(X_TE + row_T[:, None], 0) - log_E
        iterations += 1
        if rule == "absolute":
            converged = bool((column_E.exp() - previous_E.exp()).abs().mean() <= tolerance)
        else:
            converged = _marginal_error(X_TE + column_E) <= tolerance
    choice_T = (X_TE + column_E).argmax(1)
    load = torch.bincount(choice_T, minlength=E).max().item() / (T / E)
    return Study(iterations, converged, _marginal_error(X_TE + column_E), load, choice_T)


def _marginal_error(log_plan_TE: Tensor) -> float:
    T, E = log_plan_TE.shape
    return (log_plan_TE.softmax(1).sum(0) / (T / E) - 1).abs().max().item()
