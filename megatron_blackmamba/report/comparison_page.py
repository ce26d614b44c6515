"""`blackmamba compare`: runs side by side on a page and on the terminal."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from html import escape
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.evaluations import QUESTIONS
from megatron_blackmamba.report import charts, html, length
from megatron_blackmamba.report.charts import Line, short
from megatron_blackmamba.report.comparison_answer import answer
from megatron_blackmamba.report.comparison_figures import (
    AXES,
    Compared,
    common_end,
    differences,
    one_mixture,
    paired,
    read_all,
    several_tokenizers,
    shared_sources,
    trunks,
)
from megatron_blackmamba.report.history import thin
from megatron_blackmamba.report.scores import points

UNKNOWN = "not known: name the module of its own kinds in BLACKMAMBA_IMPORT"
Rows = list[list[str]]


def compare(paths: Sequence[Path], out: Path | None, console: Console) -> Path:
    """Write the page, print the tables, and return the page's path: compare.html beside the first run by default."""
    runs = read_all(paths)
    out = out or paths[0].parent / "compare.html"
    console.print(*answer(runs), sep="\n", soft_wrap=True)
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
    above = trunks(runs)
    sections = [
        html.section("Loss", [_loss(runs, above), _validation(runs, above)], _weights(runs)),
        *(_table(*each) for each in tables(runs)),
        *_by_source(runs),
        *_scores_over_tokens(runs),
        length.section({run.name: run.scores for run in runs}),
    ]
    footer = f"Written {datetime.now():%Y-%m-%d %H:%M} by blackmamba compare."
    *answers, caution = answer(runs)
    said = "".join(f'<p class="answer">{escape(line)}</p>' for line in answers) + f"<p>{escape(caution)}</p>"
    along = [run.axes(_axes([*runs, *above])) for run in (*runs, *above)]
    header = f"<h1>{escape(names)}</h1>{said}"
    return html.page(f"{names} · BlackMamba runs", header, sections, footer, along)


def _table(title: str, columns: Sequence[str], rows: Rows) -> str:
    return f"<section><h2>{escape(title)}</h2>{html.table(columns, rows)}</section>"


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
    folders = [run.history.folder.root.resolve().name for run in runs]
    rows = [
        *([["run", *folders]] if folders != [run.name for run in runs] else []),
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
    if any(loads := [_busiest(run) for run in runs]):
        rows.append(["busiest expert at the end, of the mean, in its worst layer", *(load or "–" for load in loads)])
    return [
        *rows,
        ["tokens/s, median", *(short(_median(run, "speed/tokens_per_second")) for run in runs)],
        ["processes", *(", ".join(map(str, run.history.processes)) or "not recorded" for run in runs)],
        ["memory", *(_memory(run) for run in runs)],
    ]


def _busiest(run: Compared) -> str:
    """Return the load of the busiest expert in the layer that is balanced worst; nothing without experts."""
    last = [series.value[-1] for series in run.history.of("experts/*/max_over_mean").values() if len(series.value)]
    return f"{max(last):.2f}" if last else ""


def _flops(run: Compared) -> str:
    total = run.along("flops", run.tokens.step[-1:])[0]
    return f"{total:.2e}" if np.isfinite(total) else UNKNOWN


def _validation_at(run: Compared, axis: str, place: float, bits: bool = False) -> str:
    near = run.validated_near(axis, place, bits)
    loss = run.validation_at(axis, near, bits)
    if not np.isfinite(loss):
        return "not finite" if run.validated_at(axis, near, bits) else "not validated by then"
    if near != place:
        return f"{loss:.4f} (at {near:.3e})"
    return f"{loss:.4f}" if run.validated_at(axis, place, bits) else f"{loss:.4f} (interpolated)"


def _scores(runs: Sequence[Compared]) -> Rows:
    results = [run.scores.by_task() if run.scores else {} for run in runs]
    rows = []
    for task in dict.fromkeys(task for each in results for task in each):
        keys = [each[task].key for each in results if task in each]
        differ = [name for name in QUESTIONS if len({getattr(key, name) for key in keys}) > 1]
        for metric in dict.fromkeys(m for each in results if task in each for m in each[task].metrics):
            cells = [
                f"{each[task].metrics[metric]:.4g} ± {each[task].errors.get(metric, float('nan')):.2g}"
                + "".join(f" ({str(getattr(each[task].key, name))[:12]} {name})" for name in differ)
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


def _loss(runs: Sequence[Compared], above: Sequence[Compared]) -> charts.Lines:
    curves = []
    for i, run in enumerate([*runs, *above]):
        series = run.history.scalars["loss"]
        thinned = thin(run.along("tokens", series.step), series.value)
        curve = Line(run.name, thinned.x, thinned.mean, thinned.low, thinned.high, colour=i, smooth=True, run=i)
        curves.append(curve if i < len(runs) else _trunk(curve))
    return charts.Lines("Training loss, nats per token", curves, x_label="tokens")


def _validation(runs: Sequence[Compared], above: Sequence[Compared]) -> charts.Lines:
    """Draw the validation loss, in bits per byte where the losses of different tokenizers do not compare."""
    bits, curves = several_tokenizers(runs), []
    for i, run in enumerate([*runs, *above]):
        if (series := run.bits_per_byte if bits else run.validation) is not None:
            known = np.isfinite(series.value)
            curve = Line(run.name, run.along("tokens", series.step[known]), series.value[known], colour=i, run=i)
            curves.append(curve if i < len(runs) else _trunk(curve))
    return charts.Lines(f"Validation, {'bits per byte' if bits else 'nats per token'}", curves, x_label="tokens")


def _trunk(curve: Line) -> Line:
    return replace(curve, name=f"trunk {curve.name.removeprefix('trunk-')}", low=None, high=None, thin=True)


def _by_source(runs: Sequence[Compared]) -> list[str]:
    """Return a section with each run's last validation losses, and with curves where it was validated more often."""
    by_run = [run.history.of("validation/loss/*") for run in runs]
    drawn, rows = [], []
    for source in dict.fromkeys(name for series in by_run for name in series):
        found = [series.get(source) for series in by_run]
        rows.append([source, *("–" if each is None else f"{each.value[-1]:.4f}" for each in found)])
        curves = [
            Line(run.name, run.along("tokens", series.step), series.value, colour=i, run=i)
            for i, (run, series) in enumerate(zip(runs, found, strict=True))
            if series is not None
        ]
        if max(len(curve.x) for curve in curves) > 1:
            drawn.append(charts.Lines(f"{source}, nats per token", curves, x_label="tokens"))
    last = html.table(["last validation", *(run.name for run in runs)], rows)
    return [html.section("Validation loss by source", drawn) + last] if rows else []


def _scores_over_tokens(runs: Sequence[Compared]) -> list[str]:
    """Return a section with a chart of each task that checkpoints were scored on, or nothing."""
    drawn = []
    for task in dict.fromkeys(task for run in runs for scores in run.scored for task in scores.by_task()):
        found = [(i, run, points(run.scored, task)) for i, run in enumerate(runs)]
        first = next(of_run for _, _, of_run in found if of_run)
        curves = [
            Line(run.name, run.along("tokens", of_run.steps), of_run.values, of_run.low, of_run.high, colour=i, run=i)
            for i, run, of_run in found
            if of_run is not None and of_run.metric == first.metric and of_run.key.asks(first.key)
        ]
        drawn.append(charts.Lines(f"{task} {first.metric}", curves, x_label="tokens"))
    words = "Bands are one standard error. Scores on other questions than the first run's last ones are left out."
    return [html.section("Scores over tokens", drawn, words)] if drawn else []


def _median(run: Compared, scalar: str) -> float:
    return float(np.nanmedian(run.history.scalars[scalar].value))


def _memory(run: Compared) -> str:
    series = run.history.scalars.get("speed/memory_bytes")
    return "not recorded" if series is None else f"{np.nanmax(series.value) / 2**30:.2f} GiB"


def _number(value: float) -> str:
    return "not finite" if not np.isfinite(value) else f"{value:.4f}"


def _value(value: object) -> str:
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
