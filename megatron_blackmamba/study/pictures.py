"""The main charts of a study as PNG files: loss against training FLOPs, and the cost of generation against length."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_blackmamba.formats.evaluations import TaskResult
from megatron_blackmamba.report.pictures import picture
from megatron_blackmamba.study import generation, length
from megatron_blackmamba.study.results import Group, Result, grouped
from megatron_blackmamba.study.runs import Study


def write_pictures(
    study: Study, results: Sequence[Result], folder: Path, by_length: dict[str, TaskResult] | None = None
) -> list[Path]:
    """Write loss.png, generation.png and length.png, if there is something to show in them."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = grouped(results, "run")
    drawers = {
        "loss": partial(_loss, runs),
        "generation": partial(_generation, generation.read(study.folder)),
        "length": partial(length.draw, by_length or {}),
    }
    return [path for name, draw in drawers.items() if (path := picture(folder / f"{name}.png", draw, columns=2))]


def _loss(runs: Sequence[Group], axes: Any) -> bool:
    """Draw validation loss during training, a line for each seed, and at the end, with confidence over the seeds."""
    if not runs:
        return False
    during, after = axes
    names, sizes = _unique(group.group for group in runs), _unique(group.size for group in runs)
    places = np.arange(len(sizes))
    for i, name in enumerate(names):
        groups = [group for group in runs if group.group == name]
        for group in groups:
            width = 1 + sizes.index(group.size)
            for result in group.results:
                _, spent, losses = zip(*result.curve, strict=True)
                during.plot(spent, losses, color=f"C{i}", alpha=0.6, linewidth=width, solid_capstyle="round")
        at = [places[sizes.index(group.size)] + 0.1 * (i - (len(names) - 1) / 2) for group in groups]
        half = [group.interval("validation") or np.nan for group in groups]
        means = [group.mean("validation") for group in groups]
        after.errorbar(at, means, half, color=f"C{i}", fmt="o", capsize=3)
        during.plot([], [], color=f"C{i}", linewidth=2, label=name.replace("_", " "))
    during.set(xscale="log", xlabel="training FLOPs", ylabel="validation loss")
    during.set_title(f"during training, each seed (thin to thick: {', '.join(sizes)})", fontsize="medium")
    during.xaxis.set_minor_formatter("")
    during.legend(frameon=False)
    after.set_xticks(places, sizes)
    after.set(xlabel="size", xlim=(-0.5, len(sizes) - 0.5))
    lows, highs = zip(during.get_ylim(), after.get_ylim(), strict=True)
    for place in axes:  # one scale for both, which holds the whole of each interval
        place.set_ylim(min(lows), max(highs))
    several = any(len(group.results) > 1 for group in runs)
    after.set_title("at the end" + (", mean and 95% confidence over seeds" if several else ""), fontsize="medium")
    return True


def _generation(measured: Sequence[dict[str, Any]], axes: Any) -> bool:
    """Draw the time of a token and the bytes of state of the largest size."""
    if not measured:
        return False
    size = measured[-1]["size"]
    for one in (one for one in measured if one["size"] == size):
        for place, field, scale in zip(axes, ("milliseconds", "bytes"), (1, 2**20), strict=True):
            values = [value / scale for value in one[field]]
            place.plot(one["lengths"], values, marker="o", markersize=3, label=one["group"].replace("_", " "))
    for place, label in zip(axes, ("milliseconds a token, batch 1", "MiB of state"), strict=True):
        place.set(xlabel=f"length in tokens ({size} models)", ylabel=label, ylim=(0, None))
    axes[0].legend(frameon=False)
    return True


def _unique(names: Any) -> list[str]:
    return list(dict.fromkeys(names))
