"""`blackmamba evaluate`, as the command line has it."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron_blackmamba.console.progress import Progress, State
from megatron_blackmamba.evaluation.evaluate import Options, evaluate
from megatron_blackmamba.evaluation.table import all_texts, show
from megatron_blackmamba.evaluation.tasks import load_tasks
from megatron_blackmamba.formats.evaluations import Evaluation

HOW = ("task_version", "scorer", "precision", "encoding", "max_length", "limit")
WIDTH = 160
"""Columns where the output goes to a file."""


def run(path: Path, options: Options, as_json: bool) -> Evaluation:
    """Score, show progress on standard error, and print the result."""
    state = State(0.0, "loading the model and the tasks")

    def told(task: str, done: int, total: int) -> None:
        nonlocal state
        state = State(done / total, f"{task}: {total:,} tokens")

    with Progress(lambda: state):
        found = evaluate(path, options, told)
    if as_json:
        print(json.dumps(summary(found), ensure_ascii=False))
    else:
        show(found, Console() if sys.stdout.isatty() else Console(width=WIDTH))
    return found


def fill(names: Sequence[str], folder: Path) -> None:
    """Download what a folder of tasks lacks, one task at a time, and print its files."""
    state = State(0.0, "")
    with Progress(lambda: state):
        for number, name in enumerate(names):
            state = State(number / len(names), f"{name}: downloading")
            (task,) = load_tasks([name], folder, download=True)
            print(f"{task.file}: {len([*task.task.eval_docs]):,} questions")


def summary(found: Evaluation) -> dict:
    """Return the result without the answers to single questions."""
    whole = all_texts(found)
    return {
        "model": found.model,
        "step": found.step,
        **({"all_texts": whole} if whole else {}),
        "tasks": {
            result.key.task: {
                "metrics": dict(result.metrics),
                "standard_errors": dict(result.errors),
                "questions": result.questions,
                **dict(result.counts),
                **({"rows": [*map(dict, result.rows)]} if result.rows else {}),
                "seconds": result.seconds,
                "data": {"file": result.data_file, "sha256": result.key.data},
                **{name: getattr(result.key, name) for name in HOW},
            }
            for result in found.results
        },
    }
