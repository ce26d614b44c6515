"""The scores of a run's checkpoints on one task, as points of a curve."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_blackmamba.evaluation import paper
from megatron_blackmamba.formats.evaluations import Evaluation


@dataclass(frozen=True)
class Points:
    """One metric of a task by step, with one standard error around it."""

    metric: str
    steps: np.ndarray
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray


def points(scored: Sequence[Evaluation], task: str) -> Points | None:
    """Return the scores on a task, by the paper's metric if it has that; None without any."""
    results = [(each.step or 0, each.by_task()[task]) for each in scored if task in each.by_task()]
    if not results:
        return None
    first = results[0][1].metrics
    metric = paper.METRIC if paper.METRIC in first else next(iter(first))
    chosen = [(step, result) for step, result in results if metric in result.metrics]
    values = np.array([result.metrics[metric] for _, result in chosen])
    errors = np.array([result.errors.get(metric, 0.0) for _, result in chosen])
    return Points(metric, np.array([step for step, _ in chosen]), values, values - errors, values + errors)
