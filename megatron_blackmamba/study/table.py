"""A table that a page shows and other documents quote."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from megatron_blackmamba.report import html

LONG = 20
"""Rows of a table that a page shows unfolded, at most."""


@dataclass(frozen=True)
class Table:
    """Rows under a title, with words on how to read them."""

    title: str
    words: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def html(self) -> str:
        """Return a section of a page; nothing without rows."""
        if not self.rows:
            return ""
        table = html.table(self.columns, self.rows)
        if len(self.rows) > LONG:
            table = html.folded(f"{len(self.rows)} rows", table)
        return f"<section><h2>{escape(self.title)}</h2><p>{escape(self.words)}</p>{table}</section>"

    def markdown(self) -> str:
        """Return the table in Markdown, with the signs of a typeset text."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        drawn = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return f"### {self.title}\n\n{self.words}\n\n{signs(drawn)}\n"


def signs(text: str) -> str:
    """Return text with a minus sign before numbers instead of a hyphen."""
    return re.sub(r"(?<![\w-])-(?=\d)", "−", text)
