"""The page: what a reader wants to know first, then the curves, then what they were made with."""

import platform
import shlex
from dataclasses import replace
from datetime import datetime, timedelta
from html import escape

import numpy as np
import yaml

from megatron_blackmamba.evaluation import paper
from megatron_blackmamba.formats.evaluations import read_run
from megatron_blackmamba.report import charts, html, length
from megatron_blackmamba.report.charts import Chart, Line, Mark
from megatron_blackmamba.report.history import History, Series, thin
from megatron_blackmamba.report.scores import points
from megatron_blackmamba.training.metrics import metric_of
from megatron_blackmamba.version import __version__

ROUTER_POINTS = 200
SOURCE_POINTS = 60
"""Points of the loss by source, each a mean over many steps: a batch has few samples of a source."""
SHOWN_ELSEWHERE = {
    *("loss", "source/loss/*", "validation/loss", "validation/loss/*"),
    *("validation/bits_per_byte", "validation/bits_per_byte/*"),
    *("experts/*/max_over_mean", "experts/*/share/*"),
}

BALANCE = (
    "The share of a layer's tokens that each expert gets. Equal shares are best; the vertical lines mark them. The"
    " busiest expert over the mean is 1 in perfect balance, and up to about 1.3 is good. The number of experts is the"
    " worst: one expert gets all tokens."
)


def render(history: History) -> str:
    """Return the whole page as one HTML string."""
    title = f"{history.name} · BlackMamba run"
    sections = [
        html.section("Loss", [loss(history), *source_losses(history), *bits_per_byte(history)]),
        evaluations(history),
        html.section("Mixture", [mixture(history)], _mixture_words(history)),
        html.section("Experts", [*experts(history)], BALANCE),
        html.section("Optimisation, speed and other metrics", [*others(history)]),
        _interruptions(history),
        _spikes(history),
        _samples(history),
        html.details("Configuration", yaml.safe_dump(history.config, sort_keys=False)),
        html.details("Environment", _environment()),
    ]
    header = f"<h1>{escape(history.name)}</h1>{_facts(history)}"
    return html.page(title, header, sections, _footer(history))


def pictures(history: History) -> dict[str, list[Chart]]:
    """Return the main charts by the name of their file."""
    shares: list[Chart] = [chart for chart in experts(history) if isinstance(chart, charts.Shares)]
    return {"loss": [loss(history), *source_losses(history)], "experts": shares, "mixture": [mixture(history)]}


def loss(history: History) -> Chart:
    curves = [_curve("training", history.scalars["loss"], 0)] if "loss" in history.scalars else []
    validation = history.validation_loss
    if validation is not None:
        curves.append(_through("validation", validation, colour=1))
    for trunk in history.trunks:
        curves.append(replace(_curve(f"trunk {trunk.name}", trunk.scalars["loss"], 0), thin=True, low=None, high=None))
        if (validation := trunk.validation_loss) is not None:
            curves.append(replace(_through(f"trunk {trunk.name}, validation", validation, colour=1), thin=True))
    return charts.Lines("Loss", curves, marks(history))


def source_losses(history: History) -> list[Chart]:
    losses = history.of("source/loss/*")
    if len(losses) < 2:
        return []
    curves = []
    for i, (name, series) in enumerate(losses.items()):
        thinned = thin(series.step, series.value, SOURCE_POINTS)
        curves.append(Line(name, thinned.x, thinned.mean, colour=i))
    drawn: list[Chart] = [charts.Lines("Loss by source", curves)]
    validation = [
        _through(name, series, colour=list(losses).index(name))
        for name, series in history.of("validation/loss/*").items()
        if name in losses
    ]
    return [*drawn, charts.Lines("Validation loss by source", validation)] if validation else drawn


def bits_per_byte(history: History) -> list[Chart]:
    """Return a chart of validation in bits per byte: of the mixture, and of its sources."""
    if history.bits_per_byte is None:
        return []
    sources = history.of("validation/bits_per_byte/*")
    curves = [_through("mixture", history.bits_per_byte, colour=0)]
    curves += [_through(name, series, colour=i) for i, (name, series) in enumerate(sources.items(), 1)]
    return [charts.Lines("Validation, bits per byte", curves[: 1 if len(sources) == 1 else None])]


def evaluations(history: History) -> str:
    """Return the scores over tokens, with the paper's final scores as lines, and the last ones as a table."""
    found = read_run(history.folder.root)
    if not found:
        return ""
    drawn, tokens = [], history.scalars["consumed_tokens"]
    for task in dict.fromkeys(task for evaluation in found for task in evaluation.by_task()):
        of_task = points(found, task)
        assert of_task is not None
        metric, places = of_task.metric, list(np.interp(of_task.steps, tokens.step, tokens.value))
        curves = [Line(f"{task} {metric}", places, of_task.values, of_task.low, of_task.high)]
        ends = [0, places[-1]]
        for i, row in enumerate(paper.MAIN if metric == paper.METRIC else ()):
            theirs = row.score(task)
            if theirs is not None:
                curves.append(Line(f"{row.label}, paper", ends, [theirs, theirs], colour=i + 1, dashed=True))
        drawn.append(charts.Lines(task, curves, x_label="tokens"))
    words = "Bands are one standard error; dashed lines are the paper's final scores. BoolQ has no figure in the paper."
    return html.section("Scores", drawn, words) + html.scores(found[-1]) + length.section({history.name: found[-1]})


def mixture(history: History) -> Chart:
    planned, achieved = history.planned, history.achieved
    names = list(achieved)
    groups = {
        "planned": [planned.get(name, 0.0) for name in names],
        "achieved": [achieved[name] for name in names],
    }
    return charts.Bars("Share of the samples", names, groups)


def experts(history: History) -> list[Chart]:
    loads = history.of("experts/*/max_over_mean")
    shares = {layer: expert_shares(history, layer) for layer in loads}
    if not loads:
        return [charts.Lines("Tokens by expert", [])]
    last = np.array([shares[layer][-1] for layer in loads])
    curves = [
        Line(f"layer {layer}", series.step[_some_rows(series.step)], series.value[_some_rows(series.step)], colour=i)
        for i, (layer, series) in enumerate(loads.items())
        if layer in _some(list(loads))
    ]
    step = int(next(iter(loads.values())).step[-1])
    drawn: list[Chart] = [
        charts.Shares(f"At step {step:,}, by layer", [f"layer {layer}" for layer in loads], last),
        charts.Lines("Busiest expert over the mean", curves, zero=True),
    ]
    for layer in _some(list(loads)):
        rows = _some_rows(shares[layer])
        names = [f"expert {i}" for i in range(shares[layer].shape[1])]
        title = f"Layer {layer}, over training"
        drawn.append(charts.Stacked(title, loads[layer].step[rows].tolist(), shares[layer][rows], names))
    return drawn


def expert_shares(history: History, layer: str) -> np.ndarray:
    """Return steps × experts: the share of the layer's tokens that each expert got."""
    found = metric_of("experts/*/share/*")
    series = [values for name, values in history.scalars.items() if (found.key_of(name) or "").split("/")[0] == layer]
    return np.stack([values.value for values in series], axis=1)


def others(history: History) -> list[Chart]:
    """Return a chart of every metric that no other section shows, a line for each of its keys."""
    groups: dict[str, list[str]] = {}
    for name in history.scalars:
        groups.setdefault(metric_of(name).name, []).append(name)
    drawn: list[Chart] = []
    for metric in sorted(map(metric_of, groups), key=lambda metric: metric.order):
        if metric.in_report and metric.name not in SHOWN_ELSEWHERE:
            lines = [
                _curve(metric.key_of(name) or metric.title, history.scalars[name], len(drawn) + i)
                for i, name in enumerate(groups[metric.name])
            ]
            if any(len(line.x) for line in lines):
                drawn.append(charts.Lines(metric.title, lines, zero=metric.from_zero))
    return drawn


def marks(history: History) -> list[Mark]:
    """Return the events that interrupted the run, at most the last few hundred of each kind."""
    trunk = history.trunk
    return [
        *(
            [Mark(trunk.step, "branch", f"branches from {trunk.run.root.name} after step {trunk.step}")]
            if trunk
            else []
        ),
        *(Mark(step, "skipped", f"step {step}: {why}") for step, why in history.skipped[-300:]),
        *(Mark(step, "restart", f"restarted after step {step}") for step in history.restarts[-300:]),
        *(Mark(step, "rewind", f"rewound to step {step}") for step in history.rewinds[-300:]),
    ]


def _curve(name: str, series: Series, colour: int) -> Line:
    thinned = thin(series.step, series.value)
    return Line(name, thinned.x, thinned.mean, thinned.low, thinned.high, colour=colour)


def _through(name: str, series: Series, colour: int) -> Line:
    known = np.isfinite(series.value)
    return Line(name, series.step[known], series.value[known], colour=colour)


def _some_rows(rows: np.ndarray) -> slice:
    return slice(None, None, max(1, len(rows) // ROUTER_POINTS))


def _some(layers: list[str], most: int = 6) -> list[str]:
    """Return all layers if there are few, else some across the depth, including the first and the last."""
    if len(layers) <= most:
        return layers
    return [layers[round(i * (len(layers) - 1) / (most - 1))] for i in range(most)]


def _facts(history: History) -> str:
    last, total = history.last, history.total_steps
    state = "finished" if history.finished else "in progress or stopped"
    trunk = history.trunk
    facts = [
        *([("branch of", f"{trunk.run.root.name}, after step {trunk.step:,}")] if trunk else []),
        ("step", f"{last['step']:,} of {total:,}"),
        ("tokens", charts.short(last["consumed_tokens"])),
        ("loss", "–" if last["loss"] is None else f"{last['loss']:.3f}"),
        ("tokens/s", charts.short(float(np.nanmedian(history.scalars["speed/tokens_per_second"].value[-200:])))),
        ("state", state),
    ]
    validation = history.validation_loss
    if validation is not None:
        facts.insert(3 + bool(trunk), ("validation loss", f"{validation.value[-1]:.3f}"))
    if history.bits_per_byte is not None:
        facts.insert(4 + bool(trunk), ("bits per byte", f"{history.bits_per_byte.value[-1]:.3f}"))
    if not history.finished and last["step"] < total:
        seconds = (total - last["step"]) * float(last["speed/step_seconds"])
        facts.append(("to go", str(timedelta(seconds=round(seconds)))))
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{cells}</dl>'


def _mixture_words(history: History) -> str:
    counts = metric_of("source/samples/*").of(history.last)
    total = sum(counts.values())
    planned = history.planned
    if not counts or not planned:
        return ""
    furthest = max(abs(count - planned.get(name, 0.0) * total) for name, count in counts.items())
    return f"{total:,} samples; no source is further than {furthest:.2f} samples from its plan."


def _interruptions(history: History) -> str:
    words = [f"step {step:,}: skipped, {why}" for step, why in history.skipped]
    words += [f"step {step:,}: {remark}" for step, remark in history.remarks]
    words += [f"restarted after step {step:,}" for step in history.restarts]
    words += [f"rewound to step {step:,}" for step in history.rewinds]
    if not words:
        return html.section(
            "Interruptions",
            [],
            "None: no step skipped or remarked on, no restart except to change the config, no rewind.",
        )
    shown = "".join(f"<li>{escape(line)}</li>" for line in words[-50:])
    more = f"<p>The last 50 of {len(words):,}.</p>" if len(words) > 50 else ""
    return f"<section><h2>Interruptions</h2>{more}<ul>{shown}</ul></section>"


def _spikes(history: History) -> str:
    """Return the commands that show the documents of batches with a loss spike; synthetic data has no documents."""
    if not history.spikes or history.config["data"]["kind"] == "synthetic":
        return ""
    run = shlex.quote(str(history.folder.root))
    commands = "\n".join(
        f"blackmamba data trace {run} --samples {first}-{last}    # step {spike.step:,}"
        for spike in history.spikes[-50:]
        for first, last in spike.samples
    )
    words = "These commands show the documents in the batches, with the raw file and record of each."
    return f"<section><h2>Loss spikes</h2><p>{words}</p><pre>{escape(commands)}</pre></section>"


def _samples(history: History) -> str:
    if not history.samples:
        return ""
    blocks = "".join(f"<pre><b>{escape(prompt)}</b>{escape(text)}</pre>" for prompt, text in history.samples.items())
    return f"<section><h2>Samples</h2><p>The prompt in bold, then what the model wrote.</p>{blocks}</section>"


def _environment() -> str:
    return f"megatron-blackmamba {__version__}\nPython {platform.python_version()}\n{platform.platform()}\n"


def _footer(history: History) -> str:
    steps = history.steps
    thinned = f" Curves of {steps:,} steps show the mean and the range of stretches." if steps > 400 else ""
    return f"Written {datetime.now():%Y-%m-%d %H:%M} by blackmamba report {escape(str(history.folder.root))}.{thinned}"
