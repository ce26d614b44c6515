"""Charts, described once: inline SVG in the colours of a page, interactive with JavaScript, or plots of a PNG file."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_blackmamba.report import interactive

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 480, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 34
COLOURS = 8
FEW = 50
"""Points of a curve that is drawn whole; a longer one may lose outliers."""
FEW_NAMES = 10
"""Curves that the legend of a picture names; of more, it leaves out the dashed ones."""
ROOM = 0.055
"""Part of the height of a picture that is kept free for each line of its legend."""
FEW_DOTS = 30
"""A curve of fewer points shows each of them in a picture, as in the interactive charts."""


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
    smooth: bool = False
    """Whether it is noisy, so that the page may smooth it."""
    run: int = 0
    """Which of the page's runs says where its places lie on other axes."""

    @property
    def band(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return both edges of the band; None if there is none, or if it has no width."""
        if self.low is None or self.high is None or np.array_equal(self.low, self.high):
            return None
        return self.low, self.high


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step."""

    x: float
    kind: str
    title: str


@dataclass(frozen=True)
class Chart(ABC):
    """A chart of a page or a picture."""

    title: str

    @property
    @abstractmethod
    def shows(self) -> bool:
        """Return whether there is something to show."""

    def html(self) -> str:
        """Return the chart as an inline SVG; an empty one says so."""
        empty = _text(WIDTH / 2, 50, "nothing recorded yet", "middle")
        return self._svg() if self.shows else _figure(self.title, empty, "", 90)

    @abstractmethod
    def _svg(self) -> str: ...

    @abstractmethod
    def draw(self, axes: "Axes") -> None:
        """Draw the chart with matplotlib."""


class _Axes:
    """From values to places; y grows upwards."""

    def __init__(self, x0: float, x1: float, y0: float, y1: float, log: bool = False):
        self.log = log
        self.x0 = self.of(x0)
        self.x1 = self.of(x1) if x1 > x0 else self.x0 + 1
        pad = 0.05 * (y1 - y0) or abs(y1) * 0.1 or 1.0
        self.y0, self.y1 = (y0 if y0 == 0 else y0 - pad), y1 + pad

    def of(self, x: float) -> float:
        return math.log10(x) if self.log else x

    def x(self, value: float) -> float:
        return LEFT + (self.of(value) - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def frame(self, x_label: str) -> str:
        parts = []
        for value in ticks(self.y0, self.y1):
            place = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>')
            parts.append(_text(LEFT - 6, place + 4, short(value), "end"))
        for value in log_ticks(self.x0, self.x1) if self.log else ticks(self.x0, self.x1, 5):
            parts.append(_text(self.x(value), HEIGHT - BOTTOM + 16, short(value), "middle"))
        parts.append(
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
        )
        parts.append(_text(WIDTH - RIGHT, HEIGHT - 3, x_label, "end"))
        return "".join(parts)


@dataclass(frozen=True)
class Lines(Chart):
    """Curves over steps, with events marked below; outliers far from most points are cut off."""

    given: Sequence[Line]
    marks: Sequence[Mark] = ()
    x_label: str = "step"
    zero: bool = False
    """Whether the axis begins at 0."""
    log: bool = False
    """Whether the horizontal axis is logarithmic."""

    @property
    def curves(self) -> list[Line]:
        """Return the curves with points."""
        return [curve for curve in self.given if len(curve.x)]

    @property
    def shows(self) -> bool:
        return bool(self.curves)

    def _range(self) -> tuple[float, float]:
        """Return the lowest and highest value of the vertical axis."""
        y = np.concatenate([np.asarray(part, dtype=float) for curve in self.curves for part in _in_range(curve)])
        low, high = _most_of(y)
        return (0.0 if self.zero else low), high

    def _svg(self) -> str:
        curves = self.curves
        first, last = min(float(curve.x[0]) for curve in curves), max(float(curve.x[-1]) for curve in curves)
        axes, drawn = _Axes(first, last, *self._range(), log=self.log), []
        for curve in curves:
            colour = f"c{curve.colour % COLOURS}"
            if curve.band is not None:
                low, high = curve.band
                there, back = _points(axes, curve.x, high), _points(axes, curve.x[::-1], low[::-1])
                drawn.append(f'<polygon class="band {colour}" points="{there} {back}"/>')
            looks = " dashed" * curve.dashed + " thin" * curve.thin
            points = _points(axes, curve.x, curve.y)
            title_of = f"<title>{escape(curve.name)}</title>"
            drawn.append(f'<polyline class="line {colour}{looks}" points="{points}">{title_of}</polyline>')
            if len(curve.x) == 1:
                x, y_at = axes.x(float(curve.x[0])), axes.y(float(curve.y[0]))
                drawn.append(f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y_at:.1f}" r="3"/>')
        for mark in self.marks:
            place = axes.x(mark.x)
            drawn.append(
                f'<line class="mark {escape(mark.kind)}" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}"'
                f' y2="{HEIGHT - BOTTOM}"><title>{escape(mark.title)}</title></line>'
            )
        inside = HEIGHT - TOP - BOTTOM
        clip = f'<svg x="0" y="{TOP}" width="{WIDTH}" height="{inside}" viewBox="0 {TOP} {WIDTH} {inside}">'
        frame = axes.frame(self.x_label) + clip + "".join(drawn) + "</svg>"
        return _figure(self.title, frame, _legend(curves) + self._data(axes))

    def _data(self, axes: _Axes) -> str:
        """Return the numbers for the script that makes the chart interactive."""
        described = []
        for curve in self.curves:
            one = {"name": curve.name, "colour": curve.colour % COLOURS, "dashed": curve.dashed}
            one |= {name: value for name in ("thin", "smooth", "run") if (value := getattr(curve, name))}
            one |= {"x": interactive.numbers(curve.x), "y": interactive.numbers(curve.y)}
            if curve.band is not None:
                one |= dict(zip(("low", "high"), map(interactive.numbers, curve.band), strict=True))
            described.append(one)
        marked = [{"x": mark.x, "kind": mark.kind} for mark in self.marks]
        content = {"x_label": self.x_label, "y0": axes.y0, "y1": axes.y1, "series": described, "marks": marked}
        return interactive.data(content | ({"log": True} if self.log else {}))

    def draw(self, axes: "Axes") -> None:
        few, names = len(self.curves) <= FEW_NAMES, 0
        for curve in self.curves:
            named = len(self.curves) > 1 and (few or not curve.dashed)
            names += named
            colour, width = f"C{curve.colour}", 0.8 if curve.thin else 1.6
            marker = "." if len(curve.x) < FEW_DOTS and not curve.thin else ""
            style: Any = {
                "linestyle": "--" if curve.dashed else "-",
                "marker": marker,
                "color": colour,
                "linewidth": width,
            }
            axes.plot(curve.x, curve.y, label=curve.name if named else None, **style)
            if curve.band is not None and len(curve.x) > 1:
                axes.fill_between(curve.x, *curve.band, color=colour, alpha=0.15, linewidth=0)
            elif curve.band is not None:
                axes.errorbar(curve.x, curve.y, [curve.y - curve.band[0], curve.band[1] - curve.y], color=colour)
        for mark in self.marks:
            axes.axvline(mark.x, color="grey", linewidth=0.8, linestyle=":")
        axes.set(xlabel=self.x_label, xscale="log" if self.log else "linear")
        if self.log:
            low, high = (math.log10(end) for end in axes.get_xlim())
            axes.set_xticks(log_ticks(low, high), [short(tick) for tick in log_ticks(low, high)])
            axes.minorticks_off()
        else:
            axes.xaxis.set_major_formatter(lambda value, _: short(value))
        axes.yaxis.set_major_formatter(lambda value, _: short(value))
        scale = _Axes(0, 1, *self._range())
        axes.set_ylim(scale.y0, scale.y1 + ROOM * names * (scale.y1 - scale.y0))
        if names:
            axes.legend(loc="upper right", frameon=False, fontsize="small")


@dataclass(frozen=True)
class Forest(Chart):
    """A row for each estimate, with its interval and its number; the line is at zero, if that is among them."""

    names: Sequence[str]
    values: Sequence[float]
    halves: Sequence[float | None]
    """Half of each interval; None without one."""
    x_label: str
    signed: bool = False

    @property
    def shows(self) -> bool:
        return len(self.names) > 0

    def _ends(self) -> tuple[list[float], list[float]]:
        halves = [half or 0.0 for half in self.halves]
        lows, highs = ([v + sign * h for v, h in zip(self.values, halves, strict=True)] for sign in (-1, 1))
        return lows, highs

    def _said(self, i: int) -> str:
        half = self.halves[i]
        return f"{self.values[i]:{'+' if self.signed else ''}.3f}" + (f" ± {half:.3f}" if half is not None else "")

    def _svg(self) -> str:
        wide, label, said, row = 420, 152, 114, 22  # narrow, so that its text can be read on a phone
        height, (lows, highs) = TOP + len(self.names) * row + 34, self._ends()
        low, high = (min([0.0, *lows]), max([0.0, *highs])) if self.signed else (min(lows), max(highs))
        pad = 0.04 * (high - low) or 0.1
        span, first, whole = wide - label - said, low - pad, high - low + 2 * pad

        def at(value: float) -> float:
            return label + (value - first) / whole * span

        bottom, drawn = TOP + len(self.names) * row, []
        for tick in ticks(first, first + whole):
            kind = "axis" if tick == 0 else "grid"
            drawn.append(f'<line class="{kind}" x1="{at(tick):.1f}" x2="{at(tick):.1f}" y1="{TOP}" y2="{bottom}"/>')
            drawn.append(_text(at(tick), bottom + 14, short(tick), "middle"))
        for i, name in enumerate(self.names):
            y = TOP + (i + 0.5) * row
            drawn.append(_text(label - 8, y + 4, _clipped(name, 22), "end"))
            drawn.append(
                f'<line class="line c0" x1="{at(lows[i]):.1f}" x2="{at(highs[i]):.1f}" y1="{y}" y2="{y}"/>'
                f'<circle class="dot c0" cx="{at(self.values[i]):.1f}" cy="{y}" r="3.5">'
                f"<title>{escape(name)}: {self._said(i)}</title></circle>"
            )
            drawn.append(_text(wide - said + 6, y + 4, self._said(i), "start"))
        drawn.append(_text(label + span / 2, height - 4, self.x_label, "middle"))
        return _figure(self.title, "".join(drawn), "", height, wide)

    def draw(self, axes: "Axes") -> None:
        places = np.arange(len(self.names))
        axes.errorbar(self.values, places, xerr=[half or 0.0 for half in self.halves], fmt="o", capsize=3)
        axes.set_yticks(places, [_clipped(name, 24) for name in self.names])
        axes.invert_yaxis()
        axes.set_xlabel(self.x_label)


@dataclass(frozen=True)
class Stacked(Chart):
    """Shares `[X, names]` that add up to 1, stacked, over steps."""

    x: Sequence[float]
    shares: np.ndarray
    names: Sequence[str]
    x_label: str = "step"

    @property
    def shows(self) -> bool:
        return len(self.x) > 0

    def _whole(self) -> tuple[Sequence[float], np.ndarray]:
        """Return places and shares; a single place becomes a step wide."""
        if len(self.x) > 1:
            return self.x, self.shares
        return [self.x[0], self.x[0] + 1], np.repeat(self.shares, 2, axis=0)

    def _svg(self) -> str:
        x, shares = self._whole()
        axes = _Axes(float(x[0]), float(x[-1]), 0.0, 1.0)
        axes.y1 = 1.0
        tops = np.cumsum(shares, axis=1)
        bottoms = tops - shares
        areas = []
        for i, name in enumerate(self.names):
            there, back = _points(axes, x, tops[:, i]), _points(axes, x[::-1], bottoms[::-1, i])
            areas.append(
                f'<polygon class="area c{i % COLOURS}" points="{there} {back}"><title>{escape(name)}</title></polygon>'
            )
        return _figure(self.title, "".join(areas) + axes.frame(self.x_label), "")

    def draw(self, axes: "Axes") -> None:
        x, shares = self._whole()
        axes.stackplot(x, shares.T, labels=self.names)
        axes.set(xlabel=self.x_label, ylim=(0, 1))


@dataclass(frozen=True)
class Bars(Chart):
    """Groups of horizontal bars, with their values."""

    names: Sequence[str]
    groups: Mapping[str, Sequence[float]]

    @property
    def shows(self) -> bool:
        return bool(self.names)

    def _svg(self) -> str:
        label, row, gap, groups = 110, 15, 10, self.groups
        height = TOP + len(self.names) * (len(groups) * row + gap) + 4
        longest = max(max(values) for values in groups.values()) or 1.0
        drawn = []
        for i, name in enumerate(self.names):
            top = TOP + i * (len(groups) * row + gap)
            drawn.append(_text(label - 8, top + len(groups) * row / 2 + 4, _clipped(name), "end"))
            for j, values in enumerate(groups.values()):
                width = max(1.0, values[i] / longest * (WIDTH - label - 64))
                y, tall = top + j * row, row - 2
                drawn.append(f'<rect class="bar c{j}" x="{label}" y="{y}" width="{width:.1f}" height="{tall}" rx="2"/>')
                drawn.append(_text(label + width + 6, y + row - 4, f"{100 * values[i]:.2f}%", "start"))
        keys = [Line(name, [], [], colour=j) for j, name in enumerate(groups)]
        return _figure(self.title, "".join(drawn), _legend(keys), height)

    def draw(self, axes: "Axes") -> None:
        places, height = np.arange(len(self.names)), 0.8 / len(self.groups)
        for j, (name, values) in enumerate(self.groups.items()):
            bars = axes.barh(places + (j + 0.5) * height - 0.4, values, height=0.95 * height, label=name)
            axes.bar_label(bars, [f"{100 * value:.2f}%" for value in values], padding=3, fontsize="small")
        axes.set_yticks(places, [_clipped(name) for name in self.names])
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.legend(frameon=False, fontsize="small")


@dataclass(frozen=True)
class Shares(Chart):
    """One bar per layer with its experts' shares `[layers, experts]`; the vertical lines are equal shares."""

    layers: Sequence[str]
    shares: np.ndarray

    @property
    def shows(self) -> bool:
        return len(self.layers) > 0

    def _svg(self) -> str:
        label, row, shares = 70, 20, self.shares
        height = TOP + len(self.layers) * row + 30
        span = WIDTH - label - RIGHT
        drawn = []
        for i, name in enumerate(self.layers):
            left = float(label)
            for j, share in enumerate(shares[i]):
                width = share * span
                drawn.append(
                    f'<rect class="bar c{j % COLOURS}" x="{left:.2f}" y="{TOP + i * row}" width="{width:.2f}"'
                    f' height="{row - 3}"><title>{escape(name)}, expert {j}: {share:.1%}</title></rect>'
                )
                left += width
            drawn.append(_text(label - 8, TOP + i * row + 13, _clipped(name), "end"))
        experts, bottom = shares.shape[1], TOP + len(self.layers) * row - 3
        for j in range(1, experts):
            x = label + j * span / experts
            drawn.append(f'<line class="equal" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        for share in (0, 0.5, 1):
            drawn.append(_text(label + share * span, height - 8, f"{share:.0%}", "middle" if share < 1 else "end"))
        drawn.append(_text(label - 8, height - 8, "share", "end"))
        keys = [Line(f"expert {j}" if experts <= COLOURS else f"expert {j}, …", [], [], colour=j)
                for j in range(min(experts, COLOURS))]  # fmt: skip
        return _figure(self.title, "".join(drawn), _legend(keys), height)

    def draw(self, axes: "Axes") -> None:
        experts, lefts = self.shares.shape[1], np.cumsum(self.shares, axis=1) - self.shares
        for expert in range(experts):
            axes.barh(self.layers, self.shares[:, expert], left=lefts[:, expert], height=0.8)
        for expert in range(1, experts):
            axes.axvline(expert / experts, color="white", linewidth=1, linestyle=":")
        axes.invert_yaxis()
        axes.set(xlim=(0, 1), xlabel="share of the tokens")


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round values between `low` and `high`."""
    step = 10 ** math.floor(math.log10((high - low) / wanted))
    step *= min((1, 2, 5, 10), key=lambda factor: abs((high - low) / (factor * step) - wanted))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten between two logarithms; powers alone if those would be many."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    mantissas = (1, 2, 5) if high - low < 2.5 else (1,)
    every = [mantissa * 10.0**power for power in powers for mantissa in mantissas]
    return [value for value in every if low - 1e-9 <= math.log10(value) <= high + 1e-9]


def short(value: float) -> str:
    """Format a number: 12k, 3.4M, 2e-4, 1.5e21."""
    size = abs(value)
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if unit <= size < 1e15:
            return f"{value / unit:.3g}{name}"
    if size and not 1e-3 <= size < 1e15:
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
    curves = [*{curve.name: curve for curve in reversed(curves)}.values()][::-1]
    if len(curves) < 2:
        return ""
    keys = (f'<span class="key"><i class="swatch c{c.colour % COLOURS}"></i>{escape(c.name)}</span>' for c in curves)
    return f'<p class="legend">{"".join(keys)}</p>'


def _figure(title: str, drawing: str, legend: str, height: float = HEIGHT, width: int = WIDTH) -> str:
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg class="chart" viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(title)}">{drawing}</svg>'
        f"{legend}</figure>"
    )
