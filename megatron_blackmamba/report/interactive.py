"""Charts that can be zoomed and read by hovering: uPlot (MIT, vendor/uPlot.LICENSE), inside the page itself."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).parent / "vendor"


@cache
def head() -> str:
    """Return the style sheets: the library's, with its licence, and the page's."""
    licence, library, page = (
        (VENDOR / name).read_text("utf-8") for name in ("uPlot.LICENSE", "uPlot.min.css", "page.css")
    )
    return f"<style>/*\nuPlot\n{licence.strip()}\n*/\n{library}{page}</style>"


@cache
def scripts() -> str:
    """Return the library and the script that turns drawn charts into interactive ones. They end the page's body."""
    return "".join(
        f"<script>{(VENDOR / name).read_text('utf-8')}</script>" for name in ("uPlot.iife.min.js", "charts.js")
    )


def axes(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return where the same places of each run lie on its axes; the charts are drawn along the first one."""
    found = [{name: numbers(values) for name, values in run.items()} for run in runs]
    return f'<script type="application/json" id="axes">{json.dumps(found, separators=(",", ":"))}</script>'


def data(content: dict[str, Any]) -> str:
    """Return a chart's numbers as the script reads them; without scripts the drawing stays."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" class="chart-data">{text}</script>'


def numbers(values: Any) -> list[float | None]:
    """Return values with six digits; JSON has no NaN."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in map(float, values)]
