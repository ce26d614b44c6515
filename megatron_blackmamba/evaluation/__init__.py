"""Scores of a model on the tasks of lm-eval, through its recurrent state; results lie beside the run."""

from megatron_blackmamba.evaluation.errors import EvaluationError
