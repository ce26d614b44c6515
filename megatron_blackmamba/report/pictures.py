"""Charts as PNG files, for slides and for a README."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_blackmamba.report.charts import Chart

HEIGHT = 4.2
"""Inches, of a panel. A single panel is 8 wide, of several each is 5.5."""


def write_pictures(folder: Path, pictures: Mapping[str, Sequence[Chart]]) -> list[Path]:
    """Write NAME.png with the charts of each name side by side; charts and names with nothing to show are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, charts in pictures.items():
        if not (shown := [chart for chart in charts if chart.shows]):
            continue
        size = (8 if len(shown) == 1 else 5.5 * len(shown), HEIGHT)
        figure, panels = pyplot.subplots(1, len(shown), figsize=size, dpi=150, layout="constrained", squeeze=False)
        for chart, axes in zip(shown, panels[0], strict=True):
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(chart.title, fontsize="medium")
            chart.draw(axes)
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1])
        pyplot.close(figure)
    return written
