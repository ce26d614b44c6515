"""The page of a study, and its table for terminals."""

import itertools
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from types import MappingProxyType

import numpy as np

from megatron_blackmamba.formats.evaluations import TaskResult
from megatron_blackmamba.report import charts, html
from megatron_blackmamba.report.charts import Line, short
from megatron_blackmamba.study import length
from megatron_blackmamba.study.results import Group, Result, grouped, mean_of
from megatron_blackmamba.study.runs import Study
from megatron_blackmamba.study.table import Table

COLUMNS = (
    "model", "size", "active parameters", "tokens", "FLOPs", "learning rate", "validation loss", "bits per byte",
    "experts balanced", "training loss", "tokens/s", "fastest step, tokens/s", "memory",
)  # fmt: skip


def render(
    study: Study, results: Sequence[Result], total: int, by_length: Mapping[str, TaskResult] = MappingProxyType({})
) -> str:
    """Return the page as one string of HTML."""
    runs = grouped(results, "run")
    header = f"<h1>Study: {escape(study.name)}</h1><p>{escape(study.config.about)}</p>{_progress(len(results), total)}"
    sections = [
        _against(runs),
        *(table.html() for table in tables(runs)),
        html.section("Validation loss over training", _curves(runs), "Each line is one seed."),
        _ablations(study, results),
        html.section("Expert balance by layer", _balance(runs), "Busiest expert over the mean; 1 is perfect balance."),
        length.section(dict(by_length)),
        _generation(results, study),
        _tuning(study, results),
        html.details("Study file", study.config.model_dump_json(indent=2)),
    ]
    footer = f"Written {datetime.now():%Y-%m-%d %H:%M} by blackmamba study {escape(study.name)}."
    return html.page(f"{study.name} · BlackMamba study", header, sections, footer)


def rows(groups: Sequence[Group]) -> list[list[str]]:
    """Return the cells of the table of results."""
    return [
        [
            group.group,
            group.size,
            short(group.mean("active")),
            short(group.mean("tokens")),
            f"{group.mean('flops'):.2e}",
            f"{group.results[0].learning_rate:g}",
            _with_interval(group, "validation"),
            _with_interval(group, "bits_per_byte") if group.has_bits else "–",
            _with_interval(group, "balanced") if group.has_balanced else "–",
            _with_interval(group, "loss"),
            short(group.mean("tokens_per_second")),
            short(max(result.fastest for result in group.results)),
            f"{group.mean('memory_bytes') / 2**30:.2f} GiB",
        ]
        for group in groups
    ]


def _with_interval(group: Group, field: str) -> str:
    return mean_of([getattr(result, field) for result in group.results])


def _progress(done: int, total: int) -> str:
    return "" if done >= total else f"<p>{done} of {total} runs are finished; the same command goes on.</p>"


def _against(runs: Sequence[Group]) -> str:
    """Draw loss against FLOPs and against active parameters, a point for each size."""
    drawn = []
    for field, label in (("flops", "training FLOPs"), ("active", "active parameters")):
        curves = []
        for i, variant in enumerate(dict.fromkeys(group.group for group in runs)):
            known = [g for g in runs if g.group == variant and math.isfinite(g.mean("validation"))]
            points = sorted(known, key=lambda g: g.mean(field))
            mean = np.array([group.mean("validation") for group in points])
            half = np.array([group.interval("validation") or 0.0 for group in points])
            x = [group.mean(field) for group in points]
            curves.append(Line(variant, x, mean, mean - half, mean + half, colour=i))
        drawn.append(charts.lines(f"Validation loss against {label}", curves, x_label=label))
    return html.section("Loss", drawn, "Bands are 95% confidence intervals over the seeds.")


def tables(runs: Sequence[Group]) -> list[Table]:
    """Return the results, and the differences of all pairs of a size."""
    words = "Means over the seeds, ± the 95% confidence interval of the mean."
    return [Table("Results", words, COLUMNS, rows(runs)), _differences(runs)]


def _differences(runs: Sequence[Group]) -> Table:
    """Compare variants seed by seed, which leaves out what a seed does to all of them."""
    cells = []
    for one, other in itertools.combinations(runs, 2):
        if one.size == other.size and (values := one.differences(other, "validation")):
            by_seed = ", ".join(f"{value:+.3f}" for value in values)
            cells.append([f"{one.group} − {other.group}", other.size, mean_of(values, "+"), by_seed])
    words = "Validation loss of the first model less that of the other, ± the 95% confidence interval of the mean."
    return Table("Differences by seed", words, ("models", "size", "difference", "of each seed"), cells)


def _curves(runs: Sequence[Group]) -> list[str]:
    drawn = []
    for size in dict.fromkeys(group.size for group in runs):
        for at, label in ((0, "tokens"), (1, "training FLOPs")):
            curves = [
                Line(f"{group.group}, seed {result.seed}", *_columns(result, at), colour=i, dashed=j > 0)
                for i, group in enumerate(g for g in runs if g.size == size)
                for j, result in enumerate(group.results)
            ]
            drawn.append(charts.lines(f"{size}, by {label}", curves, x_label=label))
    return drawn


def _columns(result: Result, at: int) -> tuple[list[float], list[float]]:
    return [point[at] for point in result.curve], [point[2] for point in result.curve]


def _ablations(study: Study, results: Sequence[Result]) -> str:
    groups = grouped(results, "ablation")
    if not groups:
        return ""
    changed = {(ablation.of, ablation.size) for ablation in study.config.ablations.values()}
    base = [group for group in grouped(results, "run") if (group.group, group.size) in changed]
    return Table("Ablations", "The unchanged model comes first.", COLUMNS, rows([*base, *groups])).html()


def _balance(runs: Sequence[Group]) -> list[str]:
    drawn = []
    for group in (group for group in runs if group.results[0].busiest):
        layers = sorted(map(int, group.results[0].busiest))
        curves = [
            Line(f"seed {r.seed}", layers, [r.busiest[str(layer)] for layer in layers], colour=i)
            for i, r in enumerate(group.results)
        ]
        drawn.append(charts.lines(f"{group.group}, {group.size}", curves, x_label="layer", zero=True))
    return drawn


def _generation(results: Sequence[Result], study: Study) -> str:
    from megatron_blackmamba.study.generation import read

    measured = read(study.folder)
    if not measured:
        return ""
    drawn = []
    for size in dict.fromkeys(one["size"] for one in measured):
        some = [one for one in measured if one["size"] == size]
        times = [Line(m["group"], m["lengths"], m["milliseconds"], colour=i) for i, m in enumerate(some)]
        memory = [Line(m["group"], m["lengths"], m["bytes"], colour=i) for i, m in enumerate(some)]
        drawn.append(charts.lines(f"{size}: ms a token, batch 1", times, x_label="length", zero=True))
        drawn.append(charts.lines(f"{size}: bytes of state", memory, x_label="length", zero=True))
    return html.section("Generation", drawn, "Time of one token after so many, and what the model remembers then.")


def _tuning(study: Study, results: Sequence[Result]) -> str:
    tuned = [result for result in results if result.kind == "tuning"]
    cells = [[r.group, f"{r.learning_rate:g}", short(r.tokens), f"{r.validation:.3f}"] for r in tuned]
    rates = study.config.tuning.learning_rates
    best = {r.group: min((s for s in tuned if s.group == r.group), key=lambda s: _known(s.validation)) for r in tuned}
    edges = [group for group, r in best.items() if r.learning_rate in (min(rates), max(rates)) and len(rates) > 1]
    words = "Only the learning rate was tuned, for each model alike, at one size and seed; the lowest loss was taken."
    if edges:
        words += f" The best is at the edge of the grid for {', '.join(edges)}: a wider one might do better."
    table = html.table(("model", "learning rate", "tokens", "validation loss"), cells)
    return f"<section><h2>Tuning</h2><p>{escape(words)}</p>{table}</section>"


def _known(value: float) -> float:
    return math.inf if math.isnan(value) else value
