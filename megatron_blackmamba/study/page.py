"""The page of a study, its tables for terminals, and its pictures."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from typing import Any

import numpy as np
import rich.table

from megatron_blackmamba.formats.evaluations import Evaluation
from megatron_blackmamba.report import charts, html, length
from megatron_blackmamba.report.charts import Chart, Line, short
from megatron_blackmamba.report.confidence import half_interval, mean_of
from megatron_blackmamba.study.points import Evidence, Point, sealed, unique
from megatron_blackmamba.study.runs import Study
from megatron_blackmamba.study.table import Table

FLOPS = "training FLOPs"
CELLS: dict[str, Callable[["Group"], str]] = {
    "model": lambda group: group.name,
    "size": lambda group: group.size,
    "active parameters": lambda group: short(group.mean("active")),
    "tokens": lambda group: short(group.mean("tokens")),
    "FLOPs": lambda group: f"{group.mean('flops'):.2e}",
    "learning rate": lambda group: f"{group.points[0].rate:g}",
    "validation loss": lambda group: group.said("loss"),
    "bits per byte": lambda group: group.said("bits"),
    "experts balanced": lambda group: group.said("balanced") if group.points[0].busiest else "–",
    "training loss": lambda group: group.said("training"),
    "tokens/s": lambda group: short(group.mean("tokens_per_second")),
    "fastest step, tokens/s": lambda group: short(max(point.fastest for point in group.points)),
    "memory": lambda group: f"{group.mean('memory_bytes') / 2**30:.2f} GiB",
}
"""The columns of the table of results."""
SHOWN = ("model", "size", "validation loss", "bits per byte", "training loss", "tokens/s")
"""Columns of the table on the terminal, which fits into 80 characters."""


@dataclass(frozen=True)
class Report:
    """A study's points in sentences, tables and charts."""

    said: Sequence[str | rich.table.Table]
    """Lines and tables for the terminal."""
    parts: Sequence[str | Table]
    """Sections of the page in HTML, and tables, which `--tables` prints too."""
    pictures: Mapping[str, Sequence[Chart]] = field(default_factory=dict)
    """By the name of the file, the charts side by side."""
    answers: Sequence[str] = ()
    """What the study says, in sentences."""
    axes: Sequence[Mapping[str, Any]] = ()
    """Of each curve that has several: what html.page takes."""


@dataclass(frozen=True)
class Group:
    """The points of a variant or ablation at one size and budget, one for each seed."""

    name: str
    size: str
    budget: int
    points: tuple[Point, ...]

    def values(self, field: str) -> list[float]:
        """Return a field of all seeds."""
        return [getattr(point, field) for point in self.points]

    def mean(self, field: str) -> float:
        """Return the mean of a field over the seeds."""
        return statistics.fmean(self.values(field))

    def said(self, field: str) -> str:
        """Return the mean with its 95% interval, or – unless every seed has the field."""
        values = self.values(field)
        return "–" if None in values else mean_of(values)

    def differences(self, other: "Group") -> list[float]:
        """Return this group's validation loss less the other group's, for each seed that both have."""
        others = {point.seed: point.loss for point in other.points}
        return [point.loss - others[point.seed] for point in self.points if point.seed in others]


def grouped(points: Sequence[Point], kind: str) -> list[Group]:
    """Return the groups of one kind by size, in the order of the study."""
    some = [point for point in points if point.kind == kind]
    sizes = unique(some, "size")
    found: dict[tuple[str, str, int], list[Point]] = {}
    for point in sorted(some, key=lambda point: sizes.index(point.size)):
        name = ", ".join([point.variant, *(f"{key}={value}" for key, value in point.changed.items())])
        found.setdefault((name, point.size, point.budget), []).append(point)
    return [Group(*key, tuple(members)) for key, members in found.items()]


def render(study: Study, found: Evidence, report: Report) -> str:
    """Return the page as one string of HTML."""
    done, total = len(found.points), found.planned
    left = "" if done >= total else f"<p>{done} of {total} runs are finished; the same command goes on.</p>"
    answers = "".join(f'<p class="answer">{escape(line)}</p>' for line in report.answers)
    header = f"<h1>Study: {escape(study.name)}</h1><p>{escape(found.about)}</p>{answers}{left}"
    sections = [part.html() if isinstance(part, Table) else part for part in report.parts]
    sections.append(html.details("Study file", study.config.model_dump_json(indent=2)))
    footer = f"Written {datetime.now():%Y-%m-%d %H:%M} by blackmamba study {escape(study.name)}."
    return html.page(f"{study.name} · BlackMamba study", header, sections, footer, report.axes)


def report(study: Study, found: Evidence) -> Report:
    """Return the results, the differences by seed and what was measured, without the analysis of a question."""
    points = sealed(found.points, study.config.primary)
    runs, ablations = grouped(points, "run"), grouped(points, "ablation")
    largest = {(group.name, group.size): group for group in sorted(runs, key=lambda group: group.budget)}
    at_end = [group for group in runs if group in largest.values()]
    against, (curves, axes) = _against(runs), _curves(at_end)
    several = len({(group.size, group.budget) for group in runs}) > 1
    generated = _generation(found.generation)
    by_length = {name: Evaluation(name, None, (result,)) for name, result in found.by_length.items()}
    shown = rich.table.Table(*SHOWN, box=None, pad_edge=False, header_style="dim")
    for group in [*runs, *ablations]:
        shown.add_row(*(CELLS[column](group) for column in SHOWN))
    words = "Means over the seeds, ± the 95% confidence interval of the mean."
    return Report(
        said=[shown] if runs else [],
        answers=[*_answers(at_end)],
        axes=axes,
        parts=[
            html.section("Validation loss", [*_forests(at_end)], words),
            _differences(runs),
            Table("Results", words, [*CELLS], rows(runs)),
            html.section("Loss against cost", against, "Bands are 95% confidence intervals over the seeds.")
            if several else "",
            html.section("Validation loss over training", curves, "Each line is one seed.") if curves else "",
            _ablations(study, runs, ablations),
            html.section(
                "Expert balance by layer", _balance(at_end), "Busiest expert over the mean; 1 is perfect balance."
            ),
            length.section(by_length),
            html.section(
                "Generation", generated, "Time of one token after so many, and what the model remembers then."
            ) if generated else "",
            _tuning(study, points),
        ],
        pictures={
            "loss": [against[0], *curves],
            "generation": generated[-2:],
            "length": length.by_position(found.by_length),
        },
    )  # fmt: skip


def rows(groups: Sequence[Group]) -> list[list[str]]:
    """Return the cells of the table of results."""
    return [[cell(group) for cell in CELLS.values()] for group in groups]


def _against(runs: Sequence[Group]) -> list[Chart]:
    """Draw loss against FLOPs and against active parameters, a curve over the sizes or over the budgets of a size."""
    curves: dict[str, list[Group]] = {}
    several = len({(group.size, group.budget) for group in runs}) > len({group.size for group in runs})
    for group in (group for group in runs if math.isfinite(group.mean("loss"))):
        curves.setdefault(f"{group.name}, {group.size}" if several else group.name, []).append(group)
    drawn: list[Chart] = []
    for of, label in (("flops", FLOPS), ("active", "active parameters")):
        lines = []
        for i, (name, groups) in enumerate(curves.items()):
            groups.sort(key=lambda group: group.mean(of))
            mean = np.array([group.mean("loss") for group in groups])
            half = np.array([half_interval(group.values("loss")) or 0.0 for group in groups])
            lines.append(Line(name, [group.mean(of) for group in groups], mean, mean - half, mean + half, colour=i))
        drawn.append(charts.Lines(f"Validation loss against {label}", lines, x_label=label))
    return drawn


def _differences(runs: Sequence[Group]) -> Table:
    """Compare variants seed by seed, which leaves out what a seed does to all of them."""
    cells = []
    for one, other in itertools.combinations(runs, 2):
        if (one.size, one.budget) == (other.size, other.budget) and (values := one.differences(other)):
            by_seed = ", ".join(f"{value:+.3f}" for value in values)
            cells.append([f"{one.name} − {other.name}", other.size, mean_of(values, "+"), by_seed])
    words = "Validation loss of the first model less that of the other, ± the 95% confidence interval of the mean."
    return Table("Differences by seed", words, ("models", "size", "difference", "of each seed"), cells)


def _answers(groups: Sequence[Group]) -> Iterator[str]:
    """Yield for each size which model has the lowest loss, and how far the next one is, seed by seed."""
    for size, members in _by_loss(groups):
        first, *rest = members
        seeds = f"{len(first.points)} seed{'s' * (len(first.points) > 1)}"
        said = f"Size {size}: {first.name} has the lowest validation loss, {first.said('loss')} ({seeds})"
        if rest and (values := rest[0].differences(first)):
            said += f"; {rest[0].name} is {mean_of(values)} above it, seed by seed"
        yield f"{said}."


def _forests(groups: Sequence[Group]) -> Iterator[Chart]:
    for size, members in _by_loss(groups):
        losses = [group.values("loss") for group in members]
        names, means = [group.name for group in members], [statistics.fmean(each) for each in losses]
        label = "validation loss, nats per token"
        yield charts.Forest(f"Size {size}, lowest first", names, means, [half_interval(each) for each in losses], label)


def _by_loss(groups: Sequence[Group]) -> Iterator[tuple[str, list[Group]]]:
    """Yield each size with its groups of the largest budget, those of lower loss first."""
    known = [group for group in groups if math.isfinite(group.mean("loss"))]
    for size in dict.fromkeys(group.size for group in known):
        yield size, sorted((g for g in known if g.size == size), key=lambda group: group.mean("loss"))


def _curves(runs: Sequence[Group]) -> tuple[list[Chart], list[dict[str, Any]]]:
    """Draw the validation losses during training, of each size with two or more; return the axes of each curve too."""
    drawn: list[Chart] = []
    axes: list[dict[str, Any]] = []
    for size in dict.fromkeys(group.size for group in runs):
        curves = []
        for i, group in enumerate(g for g in runs if g.size == size):
            for j, point in enumerate(p for p in group.points if len(p.curve) > 1):
                tokens, spent, losses = (list(column) for column in zip(*point.curve, strict=True))
                curves.append(Line(group.name, spent, losses, colour=i, dashed=j > 0, run=len(axes)))
                axes.append({FLOPS: spent, "tokens": tokens})
        drawn += [charts.Lines(f"Size {size}, nats per token", curves, x_label=FLOPS)] if curves else []
    return drawn, axes


def _ablations(study: Study, runs: Sequence[Group], ablations: Sequence[Group]) -> Table:
    changed = {(ablation.of, ablation.size) for ablation in study.config.ablations.values()}
    base = [group for group in runs if ablations and (group.name, group.size) in changed]
    return Table("Ablations", "The unchanged model comes first.", [*CELLS], rows([*base, *ablations]))


def _balance(runs: Sequence[Group]) -> list[Chart]:
    drawn: list[Chart] = []
    for group in (group for group in runs if group.points[0].busiest_by_layer):
        layers = sorted(map(int, group.points[0].busiest_by_layer))
        curves = [
            Line(f"seed {p.seed}", layers, [p.busiest_by_layer[str(layer)] for layer in layers], colour=i)
            for i, p in enumerate(group.points)
        ]
        drawn.append(charts.Lines(f"{group.name}, {group.size}", curves, x_label="layer", zero=True))
    return drawn


def _generation(measured: Sequence[dict[str, Any]]) -> list[Chart]:
    """Draw the time of a token and the bytes of state of each size."""
    drawn: list[Chart] = []
    for size in dict.fromkeys(one["size"] for one in measured):
        some = [one for one in measured if one["size"] == size]
        for of, title in (("milliseconds", "ms a token, batch 1"), ("bytes", "bytes of state")):
            curves = [Line(one["group"], one["lengths"], one[of], colour=i) for i, one in enumerate(some)]
            drawn.append(charts.Lines(f"{size}: {title}", curves, x_label="length", zero=True))
    return drawn


def _tuning(study: Study, points: Sequence[Point]) -> str:
    tuned = [point for point in points if point.kind == "tuning"]
    cells = [[p.variant, f"{p.rate:g}", short(p.tokens), f"{p.loss:.3f}"] for p in tuned]
    rates, edges = study.config.tuning.learning_rates, []
    for variant in unique(tuned, "variant"):
        best = min((p for p in tuned if p.variant == variant), key=lambda p: math.inf if math.isnan(p.loss) else p.loss)
        edges += [variant] if best.rate in (min(rates), max(rates)) and len(rates) > 1 else []
    words = "Only the learning rate was tuned, for each model alike, at one size and seed; the lowest loss was taken."
    if edges:
        words += f" The best is at the edge of the grid for {', '.join(edges)}: a wider one might do better."
    return Table("Tuning", words, ("model", "learning rate", "tokens", "validation loss"), cells).html()
