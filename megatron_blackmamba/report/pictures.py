"""The report's main charts as PNG files, for slides and for a README."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_blackmamba.report.history import History, thin
from megatron_blackmamba.report.page import expert_shares


def write_pictures(history: History, folder: Path) -> list[Path]:
    """Write loss.png, experts.png and mixture.png, skipping empty charts."""
    folder.mkdir(parents=True, exist_ok=True)
    drawers = {"loss": _loss, "experts": _experts, "mixture": _mixture}
    return [path for name, draw in drawers.items() if (path := _draw(history, folder / f"{name}.png", draw))]


def _draw(history: History, path: Path, draw) -> Path | None:
    return picture(path, lambda axes: draw(history, axes))


def picture(path: Path, draw: Callable[..., bool], columns: int = 1) -> Path | None:
    """Draw a PNG of one or more plots; return None if `draw` says that there is nothing to show."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(8 if columns == 1 else 11, 4.2), dpi=150, layout="constrained")
    try:
        for one in figure.axes:
            one.spines[["top", "right"]].set_visible(False)
        if not draw(axes):
            return None
        figure.savefig(path)
        return path
    finally:
        pyplot.close(figure)


def _loss(history: History, axes) -> bool:
    thinned = thin(history.scalars["loss"].step, history.scalars["loss"].value)
    axes.plot(thinned.x, thinned.mean, linewidth=1.6, label="training, all sources")
    axes.fill_between(thinned.x, thinned.low, thinned.high, alpha=0.15)
    for trunk in history.trunks:
        thinned = thin(trunk.scalars["loss"].step, trunk.scalars["loss"].value)
        axes.plot(thinned.x, thinned.mean, linewidth=0.8, color="C0", alpha=0.75, label=f"trunk {trunk.name}")
    for name, series in history.of("validation/loss/*").items():
        axes.plot(series.step, series.value, marker="o", markersize=3, linewidth=1, label=f"{name}, validation")
    axes.set(xlabel="step", ylabel="loss", title=f"{history.name}: loss")
    axes.legend(frameon=False)
    return True


def _experts(history: History, axes) -> bool:
    loads = history.of("experts/*/max_over_mean")
    if not loads:
        return False
    step, layers = int(next(iter(loads.values())).step[-1]), [f"layer {layer}" for layer in loads]
    shares = np.array([expert_shares(history, layer)[-1] for layer in loads])
    left = np.zeros(len(layers))
    for expert in range(shares.shape[1]):
        axes.barh(layers, shares[:, expert], left=left, height=0.8)
        left += shares[:, expert]
    for expert in range(1, shares.shape[1]):
        axes.axvline(expert / shares.shape[1], color="white", linewidth=1, linestyle=":")
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the tokens", title=f"{history.name}: tokens by expert at step {step:,}")
    return True


def _mixture(history: History, axes) -> bool:
    achieved, planned = history.achieved, history.planned
    if not achieved:
        return False
    places = np.arange(len(achieved))
    axes.barh(places - 0.2, [planned.get(name, 0.0) for name in achieved], height=0.38, label="planned")
    axes.barh(places + 0.2, list(achieved.values()), height=0.38, label="achieved")
    axes.set_yticks(places, list(achieved))
    axes.invert_yaxis()
    axes.set(xlabel="share of the samples", title=f"{history.name}: mixture")
    axes.legend(frameon=False)
    return True
