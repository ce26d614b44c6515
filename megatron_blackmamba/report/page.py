"""The page: what a reader wants to know first, then the curves, then what they were made with."""

import math
import platform
import shlex
import statistics
from dataclasses import replace
from datetime import datetime, timedelta
from html import escape

import numpy as np
import yaml

from megatron_blackmamba.evaluation import paper
from megatron_blackmamba.formats.evaluations import read_run
from megatron_blackmamba.report import charts, html, length
from megatron_blackmamba.report.charts import Chart, Line, Mark
from megatron_blackmamba.report.comparison_figures import compared, last_steps
from megatron_blackmamba.report.confidence import mean_of
from megatron_blackmamba.report.history import History, Series, thin
from megatron_blackmamba.report.scores import points
from megatron_blackmamba.training.metrics import metric_of
from megatron_blackmamba.version import __version__

ROUTER_POINTS = 200
SOURCE_POINTS = 60
"""Points of the loss by source, each a mean over many steps: a batch has few samples of a source."""
FIRST_SOURCE = 2
"""Colour of the first source, after those of the training and the validation loss."""
SHOWN_ELSEWHERE = {
    *("loss", "source/loss/*", "validation/loss", "validation/loss/*"),
    *("validation/bits_per_byte", "validation/bits_per_byte/*"),
    *("experts/*/max_over_mean", "experts/*/share/*"),
}

ENVIRONMENT = f"megatron-blackmamba {__version__}\nPython {platform.python_version()}\n{platform.platform()}\n"
BALANCE = (
    "The share of a layer's tokens that each expert gets. Equal shares are best; the vertical lines mark them. The"
    " busiest expert over the mean is 1 in perfect balance, and up to about 1.3 is good. The number of experts is the"
    " worst: one expert gets all tokens."
)


def render(history: History) -> str:
    """Return the whole page as one HTML string."""
    balance = experts(history)
    over_time = [chart for chart in balance if isinstance(chart, charts.Stacked)]
    sections = [
        html.section("Loss", [loss(history), *source_losses(history)]),
        _sources(history),
        evaluations(history),
        html.section("Experts", [chart for chart in balance if not isinstance(chart, charts.Stacked)], BALANCE),
        html.folded("Shares of the experts over training", html.figures(over_time)) if over_time else "",
        html.section("Optimisation, speed and other metrics", [*others(history)]),
        _interruptions(history),
        _spikes(history),
        _samples(history),
        html.details("Configuration", yaml.safe_dump(history.config, sort_keys=False)),
        html.details("Environment", ENVIRONMENT),
    ]
    header = (
        f'<h1>{escape(history.name)}</h1><p class="what">{escape(_what(history))}</p>'
        f'<p class="answer">{escape(_answer(history))}</p>{html.facts(_facts(history))}'
    )
    along = [compared(each).axes(("step", "tokens", "flops", "hours")) for each in (history, *history.trunks)]
    return html.page(f"{history.name} · BlackMamba run", header, sections, _footer(history), along)


def pictures(history: History) -> dict[str, list[Chart]]:
    """Return the main charts by the name of their file."""
    shares: list[Chart] = [chart for chart in experts(history) if isinstance(chart, charts.Shares)]
    return {"loss": [loss(history), *source_losses(history)], "experts": shares, "mixture": [mixture(history)]}


def loss(history: History) -> Chart:
    curves = [_curve("training", history.scalars["loss"], 0)] if "loss" in history.scalars else []
    validation = history.validation_loss
    if validation is not None:
        curves.append(_through("validation", validation, colour=1))
    for run, trunk in enumerate(history.trunks, 1):
        above = replace(_curve(f"trunk {trunk.name}", trunk.scalars["loss"], 0), thin=True, low=None, high=None)
        curves.append(replace(above, run=run))
        if (validation := trunk.validation_loss) is not None:
            above = _through(f"trunk {trunk.name}, validation", validation, colour=1)
            curves.append(replace(above, thin=True, run=run))
    return charts.Lines("Loss, nats per token", curves, marks(history))


def source_losses(history: History) -> list[Chart]:
    """Return a chart of the sources, each in one colour: its training loss, and its validation loss dashed."""
    losses, validation, curves = history.of("source/loss/*"), history.of("validation/loss/*"), []
    if len(losses) < 2:
        return []
    for i, (name, series) in enumerate(losses.items(), FIRST_SOURCE):
        thinned = thin(series.step, series.value, SOURCE_POINTS)
        curves.append(Line(name, thinned.x, thinned.mean, colour=i, smooth=True))
        if name in validation:
            curves.append(replace(_through(f"{name}, validation", validation[name], colour=i), dashed=True))
    return [charts.Lines("Loss by source, nats per token", curves)]


def _sources(history: History) -> str:
    """Return what the run has read of each source, and its last losses."""
    planned, achieved = history.planned, history.achieved
    columns = {
        "source/loss/*": "training loss",
        "validation/loss/*": "validation loss",
        "validation/bits_per_byte/*": "bits per byte",
    }
    found = {words: history.of(metric) for metric, words in columns.items()}
    found = {words: series for words, series in found.items() if series}
    rows = []
    for name in dict.fromkeys([*achieved, *(name for series in found.values() for name in series)]):
        share = f"{achieved[name]:.2%}" if name in achieved else "–"
        last = [f"{statistics.fmean(_last(series[name])):.3f}" if name in series else "–" for series in found.values()]
        rows.append([name, f"{planned.get(name, 0.0):.2%}", share, *last])
    words = f"<p>{escape(_mixture_words(history))}</p>" if rows else ""
    return f"<section><h2>Sources</h2>{words}{html.table(['source', 'planned', 'read', *found], rows)}</section>"


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
                _curve(metric.key_of(name) or metric.title, history.scalars[name], i)
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
    return Line(name, thinned.x, thinned.mean, thinned.low, thinned.high, colour=colour, smooth=True)


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


def _what(history: History) -> str:
    """Say in a line what was trained, on what, and on which machine."""
    model, training = history.config["model"], history.config["training"]
    begun = history.begun[-1] if history.begun else None
    parts = [f"{model['pattern']}, width {model['hidden_size']}"]
    if history.of("experts/*/max_over_mean"):
        parts.append(f"{model['experts']} experts, {model['top_k']} for each token")
    if begun and begun.parameters and begun.active:
        parts.append(f"{charts.short(begun.parameters)} parameters, {charts.short(begun.active)} for each token")
    parts.append(f"{charts.short(training['tokens'])} tokens planned")
    if history.processes:
        number, device = history.processes[-1], f" on {begun.device}" if begun and begun.device else ""
        parts.append(f"{number} process{'es' * (number != 1)}{device}")
    return " · ".join([*parts, training["precision"]])


def _answer(history: History) -> str:
    """Say the loss, as a mean of the last steps: the loss of one step is noise."""
    said = []
    if "loss" in history.scalars:
        last = _last(history.scalars["loss"])
        steps = f"the last {len(last)} steps (95% interval of the mean)" if len(last) > 1 else "the last step"
        said.append(f"Training loss {mean_of(last)} over {steps}")
    if (validation := history.validation_loss) is not None:
        said.append(f"validation loss {validation.value[-1]:.3f} after step {validation.step[-1]:,}")
    return f"{'; '.join(said)}." if said else ""


def _last(series: Series) -> list[float]:
    """Return the last 2% of the values, at least 20 or 10%; NaN where none is finite."""
    known = series.value[np.isfinite(series.value)]
    return known[-last_steps(len(known)) :].tolist() if len(known) else [math.nan]


def _facts(history: History) -> list[tuple[str, str]]:
    last, total = history.last, history.total_steps
    seconds = float(np.nansum(history.scalars["speed/step_seconds"].value))
    trunk, validation, bits = history.trunk, history.validation_loss, history.bits_per_byte
    facts = [
        ("branch of", f"{trunk.run.root.name}, after step {trunk.step:,}" if trunk else ""),
        ("step", f"{last['step']:,} of {total:,}"),
        ("tokens", charts.short(last["consumed_tokens"])),
        ("validation loss", f"{validation.value[-1]:.3f}" if validation is not None else ""),
        ("bits per byte", f"{bits.value[-1]:.3f}" if bits is not None else ""),
        ("learning rate", _rate(history)),
        ("tokens/s", charts.short(float(np.nanmedian(history.scalars["speed/tokens_per_second"].value[-200:])))),
        ("time of the steps", str(timedelta(seconds=round(seconds)))),
        ("state", "finished" if history.finished else "in progress or stopped"),
    ]
    if not history.finished and last["step"] < total:
        seconds = (total - last["step"]) * float(last["speed/step_seconds"])
        facts.append(("to go", str(timedelta(seconds=round(seconds)))))
    return [(name, value) for name, value in facts if value]


def _rate(history: History) -> str:
    """Say where the run is in its schedule."""
    if (rate := history.scalars.get("learning_rate")) is None:
        return ""
    part = rate.value[-1] / np.nanmax(rate.value)
    return f"{rate.value[-1]:.2g}, {part:.0%} of the peak ({history.config['optimizer']['decay']})"


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


def _footer(history: History) -> str:
    steps = history.steps
    thinned = f" Curves of {steps:,} steps show the mean and the range of stretches." if steps > 400 else ""
    return f"Written {datetime.now():%Y-%m-%d %H:%M} by blackmamba report {escape(str(history.folder.root))}.{thinned}"
