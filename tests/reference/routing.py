"""Routers by their papers, one token and one expert at a time in float64: who is chosen, and by how much it counts.

NumPy and plain loops on purpose: it shares no line and no library with what it judges. Gradients are central
differences.

Shapes: T tokens, E experts.
"""

from collections.abc import Callable

import numpy as np


def sinkhorn(logits_TE: np.ndarray, top_k: int, temperature: float = 2.0) -> np.ndarray:
    """Choose the largest entries of a plan with equal columns, after one iteration from the balanced start."""
    plan = np.exp(temperature * logits_TE)
    for e in range(plan.shape[1]):
        plan[:, e] /= plan[:, e].sum()
    for t in range(len(plan)):
        plan[t] /= plan[t].sum()
    for e in range(plan.shape[1]):
        plan[:, e] /= plan[:, e].sum()
    return largest(plan, top_k)


def expert_choice(logits_TE: np.ndarray, top_k: int) -> np.ndarray:
    """Let each expert choose as many of its best tokens as make `top_k` a token."""
    tokens, experts = logits_TE.shape
    scores = softmax(logits_TE)
    chosen = np.zeros((tokens, experts), dtype=bool)
    for e in range(experts):
        for t in sorted(range(tokens), key=lambda t: -scores[t, e])[: int(np.ceil(tokens * top_k / experts))]:
            chosen[t, e] = True
    return chosen


def largest(values_TE: np.ndarray, top_k: int) -> np.ndarray:
    """Choose for each token the largest values."""
    chosen = np.zeros(values_TE.shape, dtype=bool)
    for t, row in enumerate(values_TE):
        for e in sorted(range(len(row)), key=lambda e: -row[e])[:top_k]:
            chosen[t, e] = True
    return chosen


def weights(logits_TE: np.ndarray, chosen_TE: np.ndarray, scores: str, normalized: bool) -> np.ndarray:
    """Return what each chosen expert's output is multiplied by, and zero for the others."""
    found = {"sigmoid": sigmoid, "softmax": softmax}[scores](logits_TE) * chosen_TE
    return found / found.sum(1, keepdims=True) if normalized else found


def auxiliary_loss(logits_TE: np.ndarray, chosen_TE: np.ndarray, coefficient: float, scores: str = "softmax") -> float:
    """Return Switch's: E times the sum over experts of its share of the choices times its mean probability."""
    tokens, experts = logits_TE.shape
    probability = (
        softmax(logits_TE) if scores == "softmax" else weights(logits_TE, np.ones_like(chosen_TE), scores, True)
    )
    loss = 0.0
    for e in range(experts):
        loss += chosen_TE[:, e].sum() / chosen_TE.sum() * probability[:, e].sum() / tokens
    return coefficient * experts * loss


def moved_bias(bias_E: np.ndarray, tokens_E: np.ndarray, rate: float) -> np.ndarray:
    """Return the expert bias after a step: up where there were fewer tokens than the mean, down where more."""
    moved = bias_E.copy()
    for e, count in enumerate(tokens_E):
        moved[e] += rate * np.sign(tokens_E.mean() - count)
    return moved


def gradient(function: Callable[[np.ndarray], float], at: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """Return central differences."""
    found = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[place] += step
        down[place] -= step
        found[place] = (function(up) - function(down)) / (2 * step)
    return found


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def softmax(x_TE: np.ndarray) -> np.ndarray:
    exponentials = np.exp(x_TE - x_TE.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)
