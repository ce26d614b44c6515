"""Charts as inline SVG in the colours of the page; with JavaScript, the curves are interactive."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from megatron_blackmamba.report import interactive

WIDTH, HEIGHT = 480, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 34
COLOURS = 8
FEW = 50
"""Points of a curve that is drawn whole; a longer one may lose outliers."""


@dataclass(frozen=True)
class Line:
    """A curve; with `low` and `high`, the band it moves in."""

    name: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    colour: int = 0
    dashed: bool = False
    thin: bool = False


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step."""

    x: float
    kind: str
    title: str


class _Axes:
    """From values to places; y grows upwards."""

    def __init__(self, x0: float, x1: float, y0: float, y1: float):
        self.x0, self.x1 = x0, x1 if x1 > x0 else x0 + 1
        pad = 0.05 * (y1 - y0) or abs(y1) * 0.1 or 1.0
        self.y0, self.y1 = (y0 if y0 == 0 else y0 - pad), y1 + pad

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def frame(self, x_label: str) -> str:
        parts = []
        for value in ticks(self.y0, self.y1):
            place = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>')
            parts.append(_text(LEFT - 6, place + 4, short(value), "end"))
        for value in ticks(self.x0, self.x1, 5):
            parts.append(_text(self.x(value), HEIGHT - BOTTOM + 16, short(value), "middle"))
        parts.append(
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
        )
        parts.append(_text(WIDTH - RIGHT, HEIGHT - 3, x_label, "end"))
        return "".join(parts)


def lines(
    title: str, curves: Sequence[Line], marks: Sequence[Mark] = (), x_label: str = "step", zero: bool = False
) -> str:
    """Draw curves over steps, with events marked below; outliers far from most points are cut off."""
    curves = [curve for curve in curves if len(curve.x)]
    if not curves:
        return empty(title)
    y = np.concatenate([np.asarray(part, dtype=float) for curve in curves for part in _in_range(curve)])
    low, high = _most_of(y)
    axes = _Axes(
        min(float(curve.x[0]) for curve in curves),
        max(float(curve.x[-1]) for curve in curves),
        0.0 if zero else low,
        high,
    )
    drawn = []
    for curve in curves:
        colour = f"c{curve.colour % COLOURS}"
        if curve.low is not None and curve.high is not None and not np.array_equal(curve.low, curve.high):
            there = _points(axes, curve.x, curve.high)
            back = _points(axes, curve.x[::-1], curve.low[::-1])
            drawn.append(f'<polygon class="band {colour}" points="{there} {back}"/>')
        looks = " dashed" * curve.dashed + " thin" * curve.thin
        points = _points(axes, curve.x, curve.y)
        title_of = f"<title>{escape(curve.name)}</title>"
        drawn.append(f'<polyline class="line {colour}{looks}" points="{points}">{title_of}</polyline>')
        if len(curve.x) == 1:
            x, y_at = axes.x(float(curve.x[0])), axes.y(float(curve.y[0]))
            drawn.append(f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y_at:.1f}" r="3"/>')
    for mark in marks:
        place = axes.x(mark.x)
        drawn.append(
            f'<line class="mark {escape(mark.kind)}" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}"'
            f' y2="{HEIGHT - BOTTOM}"><title>{escape(mark.title)}</title></line>'
        )
    inside = HEIGHT - TOP - BOTTOM
    clip = f'<svg x="0" y="{TOP}" width="{WIDTH}" height="{inside}" viewBox="0 {TOP} {WIDTH} {inside}">'
    chart = _data(curves, marks, axes, x_label)
    return _figure(title, axes.frame(x_label) + clip + "".join(drawn) + "</svg>", _legend(curves) + chart)


def _data(curves: Sequence[Line], marks: Sequence[Mark], axes: _Axes, x_label: str) -> str:
    """Return the numbers of a chart for the script that makes it interactive."""
    described = []
    for curve in curves:
        one = {"name": curve.name, "colour": curve.colour % COLOURS, "dashed": curve.dashed}
        one |= {"thin": True} if curve.thin else {}
        one |= {"x": interactive.numbers(curve.x), "y": interactive.numbers(curve.y)}
        if curve.low is not None and curve.high is not None and not np.array_equal(curve.low, curve.high):
            one |= {"low": interactive.numbers(curve.low), "high": interactive.numbers(curve.high)}
        described.append(one)
    marked = [{"x": mark.x, "kind": mark.kind} for mark in marks]
    content = {"x_label": x_label, "y0": axes.y0, "y1": axes.y1, "series": described, "marks": marked}
    return interactive.data(content)


def stacked(title: str, x: Sequence[float], shares: np.ndarray, names: Sequence[str], x_label: str = "step") -> str:
    """Draw shares `[X, names]` that add up to 1, stacked, over steps."""
    if len(x) == 0:
        return empty(title)
    if len(x) == 1:
        x, shares = [x[0], x[0] + 1], np.repeat(shares, 2, axis=0)
    axes = _Axes(float(x[0]), float(x[-1]), 0.0, 1.0)
    axes.y1 = 1.0
    tops = np.cumsum(shares, axis=1)
    bottoms = tops - shares
    areas = []
    for i, name in enumerate(names):
        there, back = _points(axes, x, tops[:, i]), _points(axes, x[::-1], bottoms[::-1, i])
        areas.append(
            f'<polygon class="area c{i % COLOURS}" points="{there} {back}"><title>{escape(name)}</title></polygon>'
        )
    return _figure(title, "".join(areas) + axes.frame(x_label), "")


def bars(title: str, names: Sequence[str], groups: Mapping[str, Sequence[float]]) -> str:
    """Draw groups of horizontal bars, with their values."""
    if not names:
        return empty(title)
    label, row, gap = 110, 15, 10
    height = TOP + len(names) * (len(groups) * row + gap) + 4
    longest = max(max(values) for values in groups.values()) or 1.0
    drawn = []
    for i, name in enumerate(names):
        top = TOP + i * (len(groups) * row + gap)
        drawn.append(_text(label - 8, top + len(groups) * row / 2 + 4, _clipped(name), "end"))
        for j, values in enumerate(groups.values()):
            width = max(1.0, values[i] / longest * (WIDTH - label - 64))
            y = top + j * row
            drawn.append(f'<rect class="bar c{j}" x="{label}" y="{y}" width="{width:.1f}" height="{row - 2}" rx="2"/>')
            drawn.append(_text(label + width + 6, y + row - 4, f"{100 * values[i]:.2f}%", "start"))
    keys = [Line(name, [], [], colour=j) for j, name in enumerate(groups)]
    return _figure(title, "".join(drawn), _legend(keys), height)


def shares_by_layer(title: str, layers: Sequence[str], shares: np.ndarray) -> str:
    """Draw one bar per layer with its experts' shares `[layers, experts]`; the vertical lines are equal shares."""
    if not len(layers):
        return empty(title)
    label, row = 70, 20
    height = TOP + len(layers) * row + 30
    span = WIDTH - label - RIGHT
    drawn = []
    for i, name in enumerate(layers):
        left = float(label)
        for j, share in enumerate(shares[i]):
            width = share * span
            drawn.append(
                f'<rect class="bar c{j % COLOURS}" x="{left:.2f}" y="{TOP + i * row}" width="{width:.2f}"'
                f' height="{row - 3}"><title>{escape(name)}, expert {j}: {share:.1%}</title></rect>'
            )
            left += width
        drawn.append(_text(label - 8, TOP + i * row + 13, _clipped(name), "end"))
    experts = shares.shape[1]
    for j in range(1, experts):
        x = label + j * span / experts
        drawn.append(f'<line class="equal" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + len(layers) * row - 3}"/>')
    for share in (0, 0.5, 1):
        drawn.append(_text(label + share * span, height - 8, f"{share:.0%}", "middle" if share < 1 else "end"))
    drawn.append(_text(label - 8, height - 8, "share", "end"))
    keys = [Line(f"expert {j}" if experts <= COLOURS else f"expert {j}, …", [], [], colour=j)
            for j in range(min(experts, COLOURS))]  # fmt: skip
    return _figure(title, "".join(drawn), _legend(keys), height)


def empty(title: str) -> str:
    """Draw an empty chart that says so."""
    return _figure(title, _text(WIDTH / 2, 50, "nothing recorded yet", "middle"), "", 90)


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round values between `low` and `high`."""
    step = 10 ** math.floor(math.log10((high - low) / wanted))
    step *= min((1, 2, 5, 10), key=lambda factor: abs((high - low) / (factor * step) - wanted))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """Format a number: 12k, 3.4M, 2e-4."""
    size = abs(value)
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:.3g}{name}"
    if size and size < 1e-3:
        digits, power = f"{value:.1e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.3g}"


def _in_range(curve: Line) -> list[Any]:
    """Return what the axis must reach: the curve, and the band if it is not one of many noisy points."""
    band = [curve.low, curve.high] if len(curve.x) <= FEW else []
    return [curve.y, *(edge for edge in band if edge is not None)]


def _most_of(y: np.ndarray) -> tuple[float, float]:
    """Return a range that excludes only a few extreme points."""
    low, high = float(y.min()), float(y.max())
    if len(y) > FEW:
        usual = float(np.quantile(y, 0.995))
        if high - low > 3 * (usual - low) > 0:
            high = usual
    return low, high


def _points(axes: _Axes, x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> str:
    return " ".join(f"{axes.x(float(a)):.1f},{axes.y(float(b)):.1f}" for a, b in zip(x, y, strict=True))


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _clipped(name: str, most: int = 15) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _legend(curves: Sequence[Line]) -> str:
    if len(curves) < 2:
        return ""
    keys = (f'<span class="key"><i class="swatch c{c.colour % COLOURS}"></i>{escape(c.name)}</span>' for c in curves)
    return f'<p class="legend">{"".join(keys)}</p>'


def _figure(title: str, drawing: str, legend: str, height: float = HEIGHT) -> str:
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">{drawing}</svg>'
        f"{legend}</figure>"
    )
