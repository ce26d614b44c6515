"""The page: what a reader wants to know first, then the curves, then what they were made with."""

import platform
from datetime import datetime, timedelta
from html import escape

import numpy as np
import yaml

from megatron_blackmamba import __version__
from megatron_blackmamba.report import charts
from megatron_blackmamba.report.charts import Line, Mark
from megatron_blackmamba.report.history import History, thin
from megatron_blackmamba.report.style import STYLE

ROUTER_POINTS = 200


def render(history: History) -> str:
    """The whole page as one string of HTML."""
    title = f"{history.name} · BlackMamba run"
    sections = [
        _section("Loss", [loss(history), *source_losses(history)]),
        _section("Mixture", [mixture(history)], _mixture_words(history)),
        _section("Experts", [*experts(history)], "The share of a layer's tokens that each expert gets."),
        _section("Optimisation and speed", [*rates(history)]),
        _interruptions(history),
        _samples(history),
        _details("Configuration", yaml.safe_dump(history.config, sort_keys=False)),
        _details("Environment", _environment()),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head><body><main><header><h1>{escape(history.name)}</h1>{_facts(history)}</header>"
        f"{''.join(sections)}<footer>{_footer(history)}</footer></main></body></html>\n"
    )


def loss(history: History) -> str:
    thinned = thin(history.step, history.columns["loss"])
    curves = [Line("training", thinned.x, thinned.mean, thinned.low, thinned.high, colour=0)]
    held_out = _mean_validation(history)
    if held_out:
        curves.append(_through("held out", held_out, colour=1))
    return charts.lines("Loss", curves, marks(history))


def source_losses(history: History) -> list[str]:
    if len(history.source_loss) < 2:
        return []
    curves = []
    for i, (name, values) in enumerate(history.source_loss.items()):
        thinned = thin(history.step, values, 150)
        curves.append(Line(name, thinned.x, thinned.mean, colour=i))
    drawn = [charts.lines("Loss by source", curves)]
    held_out = [
        _through(name, points, colour=list(history.source_loss).index(name))
        for name, points in history.validation.items()
        if name in history.source_loss
    ]
    return [*drawn, charts.lines("Held-out loss by source", held_out)] if held_out else drawn


def mixture(history: History) -> str:
    planned, achieved = history.planned, history.achieved
    names = list(achieved)
    groups = {
        "planned": [planned.get(name, 0.0) for name in names],
        "achieved": [achieved[name] for name in names],
    }
    return charts.bars("Share of the samples", names, groups)


def experts(history: History) -> list[str]:
    if not history.router:
        return [charts.empty("Tokens by expert")]
    layers = list(history.router[-1][1])
    last = np.array([history.router[-1][1][layer]["shares"] for layer in layers])
    drawn = [
        charts.shares_by_layer(f"At step {history.router[-1][0]:,}, by layer", [_plain(n) for n in layers], last),
        charts.lines("Busiest expert over the mean", _loads(history, layers), zero=True),
    ]
    picked = history.router[:: max(1, len(history.router) // ROUTER_POINTS)]
    steps = [step for step, _ in picked]
    for layer in _some(layers):
        shares = np.array([load[layer]["shares"] for _, load in picked])
        names = [f"expert {i}" for i in range(shares.shape[1])]
        drawn.append(charts.stacked(f"{_plain(layer).capitalize()}, over training", steps, shares, names))
    return drawn


def rates(history: History) -> list[str]:
    wanted = [
        ("learning_rate", "Learning rate", True),
        ("grad_norm", "Gradient norm", True),
        ("tokens_per_second", "Tokens a second", True),
        ("mfu", "Part of the GPU's peak used (MFU)", True),
    ]
    drawn = []
    for i, (column, title, zero) in enumerate(wanted):
        thinned = thin(history.step, history.columns[column])
        if len(thinned.x):
            curve = Line(title, thinned.x, thinned.mean, thinned.low, thinned.high, colour=i)
            drawn.append(charts.lines(title, [curve], zero=zero))
    return drawn


def marks(history: History) -> list[Mark]:
    """What interrupted the run; of thousands of skipped steps, the last few hundred."""
    return [
        *(Mark(step, "skipped", f"step {step}: {why}") for step, why in history.skipped[-300:]),
        *(Mark(step, "restart", f"restarted after step {step}") for step in history.restarts[-300:]),
        *(Mark(step, "rewind", f"rewound to step {step}") for step in history.rewinds[-300:]),
    ]


def _loads(history: History, layers: list[str]) -> list[Line]:
    picked = history.router[:: max(1, len(history.router) // ROUTER_POINTS)]
    steps = [step for step, _ in picked]
    return [
        Line(_plain(layer), steps, [load[layer]["max_over_mean"] for _, load in picked], colour=i)
        for i, layer in enumerate(_some(layers))
    ]


def _through(name: str, points: list[tuple[int, float]], colour: int) -> Line:
    return Line(name, [step for step, _ in points], [value for _, value in points], colour=colour)


def _some(layers: list[str], most: int = 6) -> list[str]:
    """All layers if they are few, else some spread over the depth, the first and the last among them."""
    if len(layers) <= most:
        return layers
    return [layers[round(i * (len(layers) - 1) / (most - 1))] for i in range(most)]


def _facts(history: History) -> str:
    last, total = history.last, history.total_steps
    state = "finished" if history.finished else "in progress or stopped"
    facts = [
        ("step", f"{last['step']:,} of {total:,}"),
        ("tokens", charts.short(last["consumed_tokens"])),
        ("loss", "–" if last["loss"] is None else f"{last['loss']:.3f}"),
        ("tokens/s", charts.short(float(np.nanmedian(history.columns["tokens_per_second"][-200:])))),
        ("state", state),
    ]
    held_out = _mean_validation(history)
    if held_out:
        facts.insert(3, ("held-out loss", f"{held_out[-1][1]:.3f}"))
    if not history.finished and last["step"] < total:
        seconds = (total - last["step"]) * float(last["step_seconds"])
        facts.append(("to go", str(timedelta(seconds=round(seconds)))))
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{cells}</dl>'


def _mean_validation(history: History) -> list[tuple[int, float]]:
    by_step: dict[int, list[float]] = {}
    for points in history.validation.values():
        for step, value in points:
            by_step.setdefault(step, []).append(value)
    return [(step, sum(values) / len(values)) for step, values in sorted(by_step.items())]


def _mixture_words(history: History) -> str:
    counts = history.last.get("source_samples") or {}
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
        return _section("Interruptions", [], "None: no step skipped or remarked on, no restart, no rewind.")
    shown = "".join(f"<li>{escape(line)}</li>" for line in words[-50:])
    more = f"<p>The last 50 of {len(words):,}.</p>" if len(words) > 50 else ""
    return f"<section><h2>Interruptions</h2>{more}<ul>{shown}</ul></section>"


def _samples(history: History) -> str:
    if not history.samples:
        return ""
    blocks = "".join(f"<pre><b>{escape(prompt)}</b>{escape(text)}</pre>" for prompt, text in history.samples.items())
    return f"<section><h2>Samples</h2><p>The prompt in bold, then what the model wrote.</p>{blocks}</section>"


def _section(title: str, figures: list[str], words: str = "") -> str:
    paragraph = f"<p>{escape(words)}</p>" if words else ""
    return f'<section><h2>{escape(title)}</h2>{paragraph}<div class="figures">{"".join(figures)}</div></section>'


def _details(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _environment() -> str:
    return f"megatron-blackmamba {__version__}\nPython {platform.python_version()}\n{platform.platform()}\n"


def _footer(history: History) -> str:
    steps = len(history.step)
    thinned = f" Curves of {steps:,} steps show the mean and the range of stretches." if steps > 400 else ""
    return f"Written {datetime.now():%Y-%m-%d %H:%M} by blackmamba report {escape(str(history.folder.root))}.{thinned}"


def _plain(layer: str) -> str:
    return layer.replace("_", " ")
