"""Charts that can be zoomed and read by hovering: uPlot (MIT, vendor/uPlot.LICENSE), inside the page itself."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).parent / "vendor"
STYLE = """
.uplot{font:inherit;width:100%}.u-legend{font-size:.8rem;text-align:left!important;margin:4px 0 0!important}
.u-legend .u-marker{height:3px!important}.u-legend tr.quiet{display:none}.u-legend.u-inline tr{margin-right:14px}
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


def data(content: dict[str, Any]) -> str:
    """Return a chart's numbers as the script reads them; without scripts the drawing stays."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" class="chart-data">{text}</script>'


def numbers(values: Any) -> list[float | None]:
    """Return values with six digits; JSON has no NaN."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in map(float, values)]
