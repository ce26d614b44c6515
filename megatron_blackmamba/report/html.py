"""Frame, sections and tables of the pages."""

import itertools
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from megatron_blackmamba.evaluation import paper
from megatron_blackmamba.formats.evaluations import Evaluation
from megatron_blackmamba.report import interactive
from megatron_blackmamba.report.charts import Chart

CONTENTS_FROM = 4
"""Sections of a page that gets a list of them."""


def page(title: str, header: str, sections: Sequence[str], footer: str, axes: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return a whole page, which needs no other file.

    axes: For each run of the page, places on all axes that its charts can be drawn along; the first is the default.
    """
    whole = "".join(sections)
    headings = re.findall("<section><h2>(.*?)</h2>", whole)
    links = " ".join(f'<a href="#s{number}">{heading}</a>' for number, heading in enumerate(headings))
    contents = f"<nav>{links}</nav>" if len(headings) >= CONTENTS_FROM else ""
    number = itertools.count()
    body = re.sub("<section>(?=<h2>)", lambda _: f'<section id="s{next(number)}">', whole)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"{interactive.head()}</head><body><main><header>{header}</header>"
        f"{contents}{body}<footer>{footer}</footer></main>{interactive.axes(axes)}{interactive.scripts()}</body></html>\n"
    )


def section(title: str, drawn: Sequence[Chart], words: str = "") -> str:
    """Return a heading, words and charts."""
    paragraph = f"<p>{escape(words)}</p>" if words else ""
    return f"<section><h2>{escape(title)}</h2>{paragraph}{figures(drawn) if drawn else ''}</section>"


def folded(title: str, content: str) -> str:
    """Return a part of the page that is folded away."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def details(title: str, text: str) -> str:
    """Return text that is folded away."""
    return folded(title, f"<pre>{escape(text)}</pre>")


def figures(drawn: Sequence[Chart]) -> str:
    """Return charts side by side."""
    return f'<div class="figures">{"".join(figure.html() for figure in drawn)}</div>'


def facts(found: Sequence[tuple[str, str]]) -> str:
    """Return names with their values."""
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in found)
    return f'<dl class="facts">{cells}</dl>'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first column is the heading of its row."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr><th>{escape(row[0])}</th>{''.join(map(_cell, row[1:]))}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    whole = ' class="whole"' if " ± " in text else ""  # on one line
    return f"<td{whole}>{escape(text)}</td>"


def scores(evaluation: Evaluation) -> str:
    """Return the scores beside the paper's table; in brackets, the distance in standard errors."""
    results = evaluation.by_task()
    tasks = [task for task in paper.TASKS if task in results]
    if not tasks:
        return ""
    ours = ["this model", *(f"{results[task].metrics[paper.METRIC]:.3f}" for task in tasks)]
    return table(["accuracy", *tasks], [ours, *(row.beside(results) for row in paper.ROWS)])
