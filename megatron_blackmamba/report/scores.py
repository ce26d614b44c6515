"""The scores of a run's checkpoints on one task, as points of a curve."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_blackmamba.evaluation import paper
from megatron_blackmamba.formats.evaluations import Evaluation, ScoringKey


@dataclass(frozen=True)
class Points:
    """One metric of a task by step, with one standard error around it."""

    key: ScoringKey
    """The questions."""
    metric: str
    steps: np.ndarray
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray


def points(scored: Sequence[Evaluation], task: str) -> Points | None:
    """Return the scores on the questions that the last step was asked, by the paper's metric; None without any."""
    newest = [found[task] for each in scored if task in (found := each.by_task())]
    if not newest:
        return None
    key, metrics = newest[-1].key, newest[-1].metrics
    metric = paper.METRIC if paper.METRIC in metrics else next(iter(metrics))
    alike = {each.step or 0: result for each in scored for result in each.results if result.key.asks(key)}
    chosen = [(step, result) for step, result in alike.items() if metric in result.metrics]
    values = np.array([result.metrics[metric] for _, result in chosen])
    errors = np.array([result.errors.get(metric, 0.0) for _, result in chosen])
    return Points(key, metric, np.array([step for step, _ in chosen]), values, values - errors, values + errors)
