"""`blackmamba compare`: runs side by side on a page and on the terminal."""

from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_blackmamba.formats import atomic
from megatron_blackmamba.report import charts, html, length
from megatron_blackmamba.report.charts import Line, short
from megatron_blackmamba.report.comparison_figures import (
    Compared,
    common_end,
    differences,
    one_mixture,
    paired,
    read_all,
    shared_sources,
    trunks,
)
from megatron_blackmamba.report.history import thin
from megatron_blackmamba.report.scores import points

AXES = {"step": "step", "tokens": "tokens", "flops": "training FLOPs", "hours": "hours"}
UNKNOWN = "not known: name the module of its layers in BLACKMAMBA_IMPORT"
Rows = list[list[str]]


def compare(paths: Sequence[Path], out: Path | None, console: Console) -> Path:
    """Write the page, print the tables, and return the page's path: compare.html beside the first run by default."""
    runs = read_all(paths)
    out = out or paths[0].parent / "compare.html"
    for title, columns, rows in tables(runs):
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    atomic.write_text(out, render(runs))
    return out


def render(runs: Sequence[Compared]) -> str:
    """Return the page as one string of HTML."""
    names = " and ".join(run.name for run in runs)
    sections = [
        *(f"<section><h2>{escape(title)}</h2>{html.table(columns, rows)}</section>"
          for title, columns, rows in tables(runs)),
        html.section("Training loss", [_loss(runs, axis) for axis in _axes(runs)]),
        html.section("Validation loss", [_validation(runs, axis) for axis in _axes(runs)], _weights(runs)),
        *_bits_per_byte(runs),
        html.section("Validation loss by source", _by_source(runs)),
        *_scores_over_tokens(runs),
        length.section({run.name: run.scores for run in runs}),
    ]  # fmt: skip
    footer = f"Written {datetime.now():%Y-%m-%d %H:%M} by blackmamba compare."
    return html.page(f"{names} · BlackMamba runs", f"<h1>{escape(names)}</h1>", sections, footer)


def _axes(runs: Sequence[Compared]) -> list[str]:
    """Return the axes on which every run can be drawn."""
    return [axis for axis in AXES if axis != "flops" or all(np.isfinite(run.flops_per_token) for run in runs)]


def _weights(runs: Sequence[Compared]) -> str:
    """Say how the losses of the sources are weighed."""
    histories = [run.history for run in runs]
    if one_mixture(histories):
        return "Weighted by the mixture."
    if not shared_sources(histories):
        return "Each run weighted by its own mixture: no source was validated in all of them."
    return f"All runs weighted by the mixture of {runs[0].name}, over the sources that all were validated on."


def tables(runs: Sequence[Compared]) -> list[tuple[str, list[str], Rows]]:
    """Return title, columns and rows of each table that has something to show."""
    names = [run.name for run in runs]
    config = [[key, *(_value(value) for value in values)] for key, values in differences(runs)]
    changed = [[run.name, change] for run in runs for change in run.history.changes]
    found = [
        ("Results", ["", *names], _results(runs)),
        ("Scores", ["task", *names], _scores(runs)),
        ("Scores on the same questions", ["task", "runs", "difference", "95% interval", "p"], _paired(runs)),
        ("Configuration that differs", ["key", *names], config),
        ("Configuration changed during a run", ["run", "change"], changed),
    ]
    return [(title, columns, rows) for title, columns, rows in found if rows]


def _results(runs: Sequence[Compared]) -> Rows:
    branched = [run.history.trunk for run in runs]
    rows = [
        *(
            [["branch of", *(f"{t.run.root.name} after step {t.step:,}" if t else "–" for t in branched)]]
            if any(branched)
            else []
        ),
        ["step", *(f"{run.history.last['step']:,}" for run in runs)],
        ["tokens", *(short(run.history.last["consumed_tokens"]) for run in runs)],
        ["training FLOPs", *(_flops(run) for run in runs)],
    ]
    for axis in [axis for axis in _axes(runs) if axis in ("tokens", "flops")]:
        end = common_end(runs, axis)
        losses = [run.averaged_loss(axis, end) for run in runs]
        averaged = [f"{_number(loss)} ({steps} step{'s' * (steps > 1)})" for loss, steps in losses]
        place = f"{end:.2e} FLOPs" if axis == "flops" else f"{short(end)} tokens"
        rows.append([f"training loss at {place}, mean of the last steps", *averaged])
        validation = [_validation_at(run, axis, end) for run in runs]
        rows.append([f"validation loss at {place}", *validation])
        if any(run.bits_per_byte is not None for run in runs):
            bits = [_validation_at(run, axis, end, bits=True) for run in runs]
            rows.append([f"validation, bits per byte, at {place}", *bits])
    return [
        *rows,
        ["tokens/s, median", *(short(_median(run, "speed/tokens_per_second")) for run in runs)],
        ["processes", *(", ".join(map(str, run.history.processes)) or "not recorded" for run in runs)],
        ["memory", *(_memory(run) for run in runs)],
    ]


def _flops(run: Compared) -> str:
    total = run.along("flops", run.tokens.step[-1:])[0]
    return f"{total:.2e}" if np.isfinite(total) else UNKNOWN


def _validation_at(run: Compared, axis: str, place: float, bits: bool = False) -> str:
    loss = run.validation_at(axis, place, bits)
    if not np.isfinite(loss):
        return "not finite" if run.validated_at(axis, place, bits) else "not validated by then"
    return f"{loss:.4f}" if run.validated_at(axis, place, bits) else f"{loss:.4f} (interpolated)"


def _scores(runs: Sequence[Compared]) -> Rows:
    results = [run.scores.by_task() if run.scores else {} for run in runs]
    rows = []
    for task in dict.fromkeys(task for each in results for task in each):
        mixed = len({each[task].key.encoding for each in results if task in each}) > 1
        for metric in dict.fromkeys(m for each in results if task in each for m in each[task].metrics):
            cells = [
                f"{each[task].metrics[metric]:.4g} ± {each[task].errors.get(metric, float('nan')):.2g}"
                + (f" ({each[task].key.encoding} encoding)" if mixed else "")
                if task in each and metric in each[task].metrics
                else "not scored"
                for each in results
            ]
            rows.append([f"{task} {metric}", *cells])
    return rows


def _paired(runs: Sequence[Compared]) -> Rows:
    """Compare the first run with each other one."""
    first = runs[0]
    return [
        [
            f"{one.task} {one.metric}",
            f"{run.name} − {first.name}",
            f"{one.second - one.first:+.4f}",
            f"{one.low:+.4f} … {one.high:+.4f}",
            f"{one.p:.3f}",
        ]
        for run in runs[1:]
        if first.scores and run.scores
        for one in paired(first.scores, run.scores)
    ]


def _loss(runs: Sequence[Compared], axis: str) -> charts.Lines:
    curves = []
    for i, run in enumerate(runs):
        series = run.history.scalars["loss"]
        thinned = thin(run.along(axis, series.step), series.value)
        curves.append(Line(run.name, thinned.x, thinned.mean, thinned.low, thinned.high, colour=i))
    for i, run in enumerate(trunks(runs), len(runs)):
        series = run.history.scalars["loss"]
        thinned = thin(run.along(axis, series.step), series.value)
        curves.append(Line(f"trunk {run.name}", thinned.x, thinned.mean, colour=i, thin=True))
    return charts.Lines(f"By {AXES[axis]}", curves, x_label=AXES[axis])


def _bits_per_byte(runs: Sequence[Compared]) -> list[str]:
    if all(run.bits_per_byte is None for run in runs):
        return []
    drawn = [_validation(runs, axis, bits=True) for axis in _axes(runs)]
    words = "Validation loss as bits per byte of text, which compares models with different tokenizers."
    return [html.section("Bits per byte", drawn, words)]


def _validation(runs: Sequence[Compared], axis: str, bits: bool = False) -> charts.Lines:
    curves = []
    for i, run in enumerate([*runs, *trunks(runs)]):
        series, above = run.bits_per_byte if bits else run.validation, i >= len(runs)
        if series is not None:
            known = np.isfinite(series.value)
            places, name = run.along(axis, series.step[known]), f"trunk {run.name}" if above else run.name
            curves.append(Line(name, places, series.value[known], colour=i, thin=above))
    return charts.Lines(f"By {AXES[axis]}", curves, x_label=AXES[axis])


def _by_source(runs: Sequence[Compared]) -> list[charts.Lines]:
    sources = dict.fromkeys(name for run in runs for name in run.history.of("validation/loss/*"))
    drawn = []
    for source in sources:
        found = [(i, run, run.history.of("validation/loss/*").get(source)) for i, run in enumerate(runs)]
        curves = [
            Line(run.name, run.along("tokens", series.step), series.value, colour=i)
            for i, run, series in found
            if series is not None
        ]
        drawn.append(charts.Lines(source, curves, x_label="tokens"))
    return drawn


def _scores_over_tokens(runs: Sequence[Compared]) -> list[str]:
    """Return a section with a chart of each task that checkpoints were scored on, or nothing."""
    drawn = []
    for task in dict.fromkeys(task for run in runs for scores in run.scored for task in scores.by_task()):
        found = [(i, run, points(run.scored, task)) for i, run in enumerate(runs)]
        metric = next(found.metric for _, _, found in found if found)
        curves = [
            Line(run.name, run.along("tokens", of_run.steps), of_run.values, of_run.low, of_run.high, colour=i)
            for i, run, of_run in found
            if of_run is not None and of_run.metric == metric
        ]
        drawn.append(charts.Lines(f"{task} {metric}", curves, x_label="tokens"))
    return [html.section("Scores over tokens", drawn, "Bands are one standard error.")] if drawn else []


def _median(run: Compared, scalar: str) -> float:
    return float(np.nanmedian(run.history.scalars[scalar].value))


def _memory(run: Compared) -> str:
    series = run.history.scalars.get("speed/memory_bytes")
    return "not recorded" if series is None else f"{np.nanmax(series.value) / 2**30:.2f} GiB"


def _number(value: float) -> str:
    return "not finite" if not np.isfinite(value) else f"{value:.4f}"


def _value(value: object) -> str:
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
