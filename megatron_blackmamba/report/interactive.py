"""Charts that can be zoomed and read by hovering: uPlot (MIT, vendor/uPlot.LICENSE), inside the page itself."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).parent / "vendor"
STYLE = """
.uplot{font:inherit;width:100%}.u-legend{font-size:.8rem;text-align:left!important;margin:4px 0 0!important}
.u-legend .u-marker{height:3px!important}.u-legend tr.quiet{display:none}.u-legend.u-inline tr{margin-right:14px}
.controls{position:sticky;top:0;z-index:2;display:flex;flex-wrap:wrap;gap:4px 16px;padding:6px 0;margin-bottom:8px;
background:var(--paper);color:var(--soft);font-size:.8rem}
.controls label{display:flex;align-items:center;gap:4px}.controls select{font:inherit}
.controls input[type=range]{width:80px}.controls input{margin:0;accent-color:var(--c0)}
.u-select{background:var(--c0)!important;opacity:.15}
"""


@cache
def head() -> str:
    """Return the style sheet, with the library's licence."""
    licence = (VENDOR / "uPlot.LICENSE").read_text(encoding="utf-8").strip()
    return f"<style>/*\nuPlot\n{licence}\n*/\n{(VENDOR / 'uPlot.min.css').read_text(encoding='utf-8')}{STYLE}</style>"


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
