"""The use of length by models: loss by position as a chart, retrieval as tables."""

from collections.abc import Mapping
from html import escape

import numpy as np

from megatron_blackmamba.evaluation.table import by_length
from megatron_blackmamba.evaluation.tasks import LENGTH
from megatron_blackmamba.formats.evaluations import Evaluation, TaskResult
from megatron_blackmamba.report import charts, html
from megatron_blackmamba.report.charts import Chart, Line

LOSS, *RETRIEVAL = LENGTH
WORDS = (
    "Dashed: the same tokens read in windows as long as in training. Below it, a model uses the tokens further back;"
    " above it, it breaks. A point is the mean up to its position, from half of it on."
)


def section(found: Mapping[str, Evaluation | None]) -> str:
    """Return what the last scored checkpoints of runs say about length, by name of run; nothing if they say nothing."""
    results = {name: scores.by_task() for name, scores in found.items() if scores is not None}
    losses = {name: tasks[LOSS] for name, tasks in results.items() if LOSS in tasks}
    tables = [
        f"<h3>{escape(f'{task}, {name}')}</h3>{html.table(*by_length(tasks[task])[1:])}"
        for name, tasks in results.items()
        for task in RETRIEVAL
        if task in tasks
    ]
    drawn = by_position(losses)
    words = "Of each cell: answers written greedily, and how many bits likelier the answer is than beside another fact."
    below = f"<p>{words}</p>{''.join(tables)}" if tables else ""
    return html.section("Length", drawn, WORDS if drawn else "") + below if drawn or tables else ""


def by_position(losses: Mapping[str, TaskResult]) -> list[Chart]:
    """Draw the loss by position, and less that in windows; in nats per token if a tokenizer tells no bytes."""
    known = all("bits_per_byte" in row for result in losses.values() for row in result.rows)
    unit = "bits_per_byte" if known else "nats_per_token"
    curves, beyond = [], []
    for i, (name, result) in enumerate(losses.items()):
        places = [row["to"] for row in result.rows]
        read, windows = (np.array([row[key] for row in result.rows]) for key in (unit, f"window_{unit}"))
        curves += [
            Line(name, places, read, colour=i),
            Line(f"{name}, in windows", places, windows, colour=i, dashed=True),
        ]
        beyond.append(Line(name, places, read - windows, colour=i))
    said = unit.replace("_", " ")
    return (
        [
            charts.Lines(f"Loss by position, {said}", curves, x_label="position", log=True),
            charts.Lines(f"The same less that in windows, {said}", beyond, x_label="position", log=True),
        ]
        if losses
        else []
    )
