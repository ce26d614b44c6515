"""Charts as PNG files, for slides and for a README."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_blackmamba.report.charts import Chart

HEIGHT = 4.2
"""Inches, of a panel. A single panel is 8 wide, of several each is 5.5."""


def write_pictures(folder: Path, pictures: Mapping[str, Sequence[Chart]]) -> list[Path]:
    """Write NAME.png with the charts of each name; return the files, without those that have nothing to show."""
    written = (write_picture(folder / f"{name}.png", charts) for name, charts in pictures.items())
    return [path for path in written if path is not None]


def write_picture(path: Path, charts: Sequence[Chart]) -> Path | None:
    """Write charts side by side, without those that have nothing to show; return None if none has."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if not (shown := [chart for chart in charts if chart.shows]):
        return None
    size = (8 if len(shown) == 1 else 5.5 * len(shown), HEIGHT)
    figure, panels = pyplot.subplots(1, len(shown), figsize=size, dpi=150, layout="constrained", squeeze=False)
    for chart, axes in zip(shown, panels[0], strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(chart.title, fontsize="medium")
        chart.draw(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
    return path
