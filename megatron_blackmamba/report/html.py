"""Frame, sections and tables of the pages."""

from collections.abc import Sequence
from html import escape

from megatron_blackmamba.evaluation import paper
from megatron_blackmamba.formats.evaluations import Evaluation
from megatron_blackmamba.report import interactive
from megatron_blackmamba.report.charts import Chart
from megatron_blackmamba.report.style import STYLE


def page(title: str, header: str, sections: Sequence[str], footer: str) -> str:
    """Return a whole page, which needs no other file."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<style>{STYLE}</style>{interactive.head()}</head><body><main><header>{header}</header>"
        f"{''.join(sections)}<footer>{footer}</footer></main>{interactive.scripts()}</body></html>\n"
    )


def section(title: str, figures: Sequence[Chart], words: str = "") -> str:
    """Return a heading, words and charts."""
    paragraph = f"<p>{escape(words)}</p>" if words else ""
    drawn = "".join(figure.html() for figure in figures)
    return f'<section><h2>{escape(title)}</h2>{paragraph}<div class="figures">{drawn}</div></section>'


def details(title: str, text: str) -> str:
    """Return text that is folded away."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first column is the heading of its row."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def scores(evaluation: Evaluation) -> str:
    """Return the scores beside the paper's table; in brackets, the distance in standard errors."""
    results = evaluation.by_task()
    tasks = [task for task in paper.TASKS if task in results]
    if not tasks:
        return ""
    ours = ["this model", *(f"{results[task].metrics[paper.METRIC]:.3f}" for task in tasks)]
    return table(["accuracy", *tasks], [ours, *(row.beside(results) for row in paper.ROWS)])
