"""Scores for a terminal, beside the paper's own."""

import math

from rich.console import Console
from rich.table import Table

from megatron_blackmamba.evaluation import paper
from megatron_blackmamba.formats.evaluations import Evaluation, TaskResult


def show(evaluation: Evaluation, console: Console) -> None:
    """Print every metric of every task; below, the paper's table where a task is in it."""
    results = evaluation.by_task()
    where = "" if evaluation.step is None else f", step {evaluation.step:,}"
    table = Table("task", "metric", "value", "standard error", "questions", "data", title=f"{evaluation.model}{where}")
    for name, result in results.items():
        for metric, value in result.metrics.items():
            error = result.errors.get(metric)
            shown = "–" if error is None else f"{error:.3g}"
            table.add_row(name, metric, f"{value:.5g}", shown, f"{result.questions:,}", result.key.data[:12])
    for metric, value in all_texts(evaluation).items():
        table.add_row("all texts", metric, f"{value:.5g}", "–", "–", "–", style="bold")
    console.print(table)
    for result in evaluation.results:
        if result.rows:
            title, columns, rows = by_length(result)
            console.print(_filled(Table(*columns, title=f"{result.key.task}: {title}"), rows))
    tasks = [task for task in paper.TASKS if task in results]
    if tasks:
        console.print(_beside_the_paper(results, tasks))
        console.print(_remarks(results, tasks), style="dim", highlight=False)


def by_length(result: TaskResult) -> tuple[str, list[str], list[list[str]]]:
    """Return title, columns and rows of the table of a `length` task: by position, or by length and depth."""
    if "from" in result.rows[0]:
        unit = "bits_per_byte" if "bits_per_byte" in result.rows[0] else "nats_per_token"
        columns = ["positions", unit.replace("_", " "), "read in windows", "difference"]
        rows = [
            [
                f"{row['from']:,} to {row['to']:,}",
                f"{row[unit]:.3f}",
                f"{row[f'window_{unit}']:.3f}",
                f"{row[unit] - row[f'window_{unit}']:+.3f}",
            ]
            for row in result.rows
        ]
        joined = ", documents joined" if result.counts.get("joined") else ""
        return f"loss by position{joined}", columns, rows
    depths = list(dict.fromkeys(row["depth"] for row in result.rows))
    cells = {(row["length"], row["depth"]): f"{row['accuracy']:.0%}, {row['gain_bits']:+.2f}" for row in result.rows}
    of_lengths = dict.fromkeys(row["length"] for row in result.rows)
    rows = [[f"{length:,}", *(cells[length, depth] for depth in depths)] for length in of_lengths]
    return "accuracy, and bits gained, by length and depth", ["tokens", *(f"depth {d:.0%}" for d in depths)], rows


def _filled(table: Table, rows: list[list[str]]) -> Table:
    for row in rows:
        table.add_row(*row)
    return table


def all_texts(evaluation: Evaluation) -> dict[str, float]:
    """Return bits per byte and nats per token of several texts together, over all of their bytes and tokens."""
    texts = [result for result in evaluation.results if result.key.task.startswith("text:")]
    if len(texts) < 2:
        return {}
    size, tokens = (sum(result.counts[name] for result in texts) for name in ("bytes", "tokens"))
    nats = sum(result.metrics["nats_per_token"] * result.counts["tokens"] for result in texts)
    return {"bits_per_byte": nats / math.log(2) / size, "nats_per_token": nats / tokens}


def _beside_the_paper(results: dict[str, TaskResult], tasks: list[str]) -> Table:
    table = Table("accuracy", *tasks, title="Beside the paper's table; in brackets, this model's distance from it")
    ours = [f"{results[task].metrics[paper.METRIC]:.3f} ± {results[task].errors.get('acc', 0):.3f}" for task in tasks]
    table.add_row("this model", *ours, style="bold")
    for row in paper.ROWS:
        table.add_row(*row.beside(results))
    return table


def _remarks(results: dict[str, TaskResult], tasks: list[str]) -> str:
    said = "Distances are in standard errors of this model's score."
    if any(results[task].key.limit for task in tasks):
        said += " With --limit the questions are not the paper's."
    if any(results[task].key.encoding != "separate" for task in tasks):
        said += " The paper encoded context and continuation separately: --encoding separate."
    return said
