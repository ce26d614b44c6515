"""The page of a run: honest about what it leaves out, small, and drawn in a real browser."""

import json
import platform
import re
import shutil
import subprocess
import time
from datetime import datetime

import numpy as np
import pytest
import yaml

from megatron_blackmamba.config import load, to_yaml
from megatron_blackmamba.formats.evaluations import Evaluation, ScoringKey, TaskResult
from megatron_blackmamba.formats.events import NotFinite, Resumed, Rewound, SlowRank, Spike
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.report import ReportError, write_report
from megatron_blackmamba.report.charts import short, ticks
from megatron_blackmamba.report.history import thin
from megatron_blackmamba.report.scores import points
from tests.pages import check_page
from tests.serving.browser import Browser

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]
SOURCES = ["code", "<script>alert(1)</script>", "prose"]


def load_of(layer, share):
    shares = {f"experts/{layer}/share/{expert}": value for expert, value in enumerate(share)}
    return {f"experts/{layer}/max_over_mean": 8 * max(share)} | shares


def record(step, sources=SOURCES):
    random = np.random.default_rng(step)
    share = random.dirichlet(np.full(8, 50)).tolist()
    content = {
        "step": step,
        "consumed_samples": 16 * step,
        "consumed_tokens": 16 * 128 * step,
        "loss": 6 / step**0.2 + 0.05 * float(random.standard_normal()),
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "speed/tokens_per_second": 1e5,
        "speed/step_seconds": 0.02,
        "skipped": 0,
        "speed/memory_bytes": 10**9,
    }
    content |= {f"source/loss/{name}": 6 / step**0.2 + i for i, name in enumerate(sources)}
    content |= {f"source/samples/{name}": (16 * step + 2 - i) // len(sources) for i, name in enumerate(sources)}
    if step % 10 == 0:
        content |= load_of(1, share) | load_of(3, share)
    if step % 50 == 0:
        content |= {f"validation/loss/{name}": 6 / step**0.2 + i for i, name in enumerate(sources)}
        content |= {"validation/bits_per_byte": 1.5} | {f"validation/bits_per_byte/{name}": 1.5 for name in sources}
    return content


@pytest.fixture
def make_run(tmp_path):
    def made(steps, records=None, events=()):
        run = tmp_path / "a run"
        run.mkdir(exist_ok=True)
        (run / "config.yaml").write_text(to_yaml(load("tiny", [f"training.tokens={16 * 128 * steps}"])))
        lines = (json.dumps(r) + "\n" for r in (records if records is not None else map(record, range(1, steps + 1))))
        (run / "metrics.jsonl").write_text("".join(lines))
        shares = {name: f"1/{len(SOURCES)}" for name in SOURCES}
        (run / "data_plan.json").write_text(json.dumps({"phases": [{"from_sample": 0, "shares": shares}]}))
        lines = (event.to_json(datetime(2026, 1, 1)) + "\n" for event in events)
        (run / "events.jsonl").write_text("".join(lines))
        return run

    return made


@pytest.fixture
def page(make_run):
    records = [record(step) for step in range(1, 201)]
    records[69] |= {"loss": None, "grad_norm": None, "skipped": True}
    bad = NotFinite(step=70, reason="the loss is nan", action="skip", samples=[(1104, 1119)])
    spike = Spike(step=123, reason="taken back", action="rewind", samples=[(1952, 1967)])
    run = make_run(
        400,
        records,
        [
            bad,
            SlowRank(step=80, rank=3, host="node-b", steps=50, over_median=1.52),
            Resumed(step=120, sample=1920, steps_left=280, tokens_per_step=2048),
            Resumed(step=130, sample=2080, steps_left=270, tokens_per_step=2048, changes=["training.tokens"]),
            spike,
            Rewound(step=123, to=122, passed_over=spike.samples),
        ],
    )
    return write_report(run, samples={"def f(<b>": "x & y): return '<i>'"})


@pytest.mark.parametrize("kind", ["synthetic", "mixture"])
def test_documents_of_a_spike_are_a_command_away(make_run, kind):
    spike = Spike(step=123, reason="taken back", action="rewind", samples=[(1952, 1967), (1984, 1999)])
    run = make_run(200, events=[spike])
    data = [f"data.kind={kind}", *(["data.mixture=mixture.yaml"] if kind == "mixture" else [])]
    (run / "config.yaml").write_text(to_yaml(load("tiny", data)))
    text = write_report(run).read_text()
    commands = [f"data trace &#x27;{run}&#x27; --samples {part}    # step 123" for part in ("1952-1967", "1984-1999")]
    assert [command in text for command in commands] == [kind == "mixture"] * 2  # synthetic data has no documents


def test_everything_a_reader_asks_for_is_there(page):
    text = page.read_text()
    for title in ("Loss by source", "Busiest expert over the mean", "Layer 1, over training"):
        assert title in text
    assert "200 of 400" in text
    assert "step 70: skipped, the loss is nan" in text
    assert "step 80: rank 3 (node-b) is slow" in text
    assert text.count("the loss is nan") == 2  # the list and the mark of a chart
    assert "restarted after step 130" not in text  # to change its length, as the quickstart does once
    assert "restarted after step 120" in text and "rewound to step 122" in text and "taken back" not in text
    assert "to go" in text
    assert "no source is further than 0.67 samples from its plan" in text
    losses = [record(step)["source/loss/prose"] for step in range(181, 201)]
    (cells,) = re.findall(r"<th>prose</th>(.*?)</tr>", text)
    assert re.findall(r"<td>(.*?)</td>", cells) == ["33.33%", "33.31%", f"{np.mean(losses):.3f}", "4.079", "1.500"]


def test_charts_hold_the_recorded_numbers(make_run):
    records = [record(step) for step in range(1, 61)]
    text = write_report(make_run(60, records)).read_text()
    drawn = {}
    for title, chart in re.findall(r"<figure><figcaption>([^<]*)<(.*?)</figure>", text, re.DOTALL):
        for content in re.findall(r'class="chart-data">(.*?)</script>', chart):
            drawn |= {(title, series["name"]): (series["x"], series["y"]) for series in json.loads(content)["series"]}
    keys = {("Loss, nats per token", "training"): "loss", ("Gradient norm", "Gradient norm"): "grad_norm"}
    by_source = "Loss by source, nats per token"
    keys |= {(by_source, name): f"source/loss/{name}" for name in SOURCES}
    keys |= {(by_source, f"{name}, validation"): f"validation/loss/{name}" for name in SOURCES}
    keys |= {("Busiest expert over the mean", f"layer {i}"): f"experts/{i}/max_over_mean" for i in (1, 3)}
    for chart, key in keys.items():
        steps, values = zip(*((each["step"], each[key]) for each in records if key in each), strict=True)
        assert drawn[chart] == ([*steps], pytest.approx(values, rel=1e-5)), chart


def test_runs_without_events_show_their_notes(make_run):
    """Before events.jsonl, records were nested, steps had notes and only log.txt knew of restarts."""
    names = {
        "step": 1,
        "consumed_samples": 16,
        "consumed_tokens": 2048,
        "loss": 3.0,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "tokens_per_second": 1e5,
        "step_seconds": 0.02,
        "mfu": 0.3,
        "source_loss": dict.fromkeys(SOURCES, 3.0),
        "source_samples": dict.fromkeys(SOURCES, 5),
        "router_load": {"layer_1": {"max_over_mean": 1.2, "shares": [0.6, 0.4]}},
        "validation_loss": {"code": 2.0, "prose": 4.0},
    }
    records = [names | {"step": step} for step in range(1, 201)]
    records[69] |= {"loss": None, "skipped": True, "note": "the loss is nan"}
    records[79] |= {"note": "rank 3 (node-b) is slow"}
    run = make_run(200, records)
    (run / "events.jsonl").unlink()
    (run / "data_plan.json").write_text(
        json.dumps({"phases": [{"from_sample": 0, "shares": {"code": "3/4", "prose": "1/4"}}]})
    )
    (run / "log.txt").write_text("2026-01-01 00:00:00  resumes after step 120, at sample 1920\n")
    text = write_report(run).read_text()
    assert "step 70: skipped, the loss is nan" in text and "step 80: rank 3 (node-b) is slow" in text
    assert "restarted" not in text
    assert "(MFU)" in text and "Layer 1, over training" in text and "<dt>validation loss</dt><dd>2.500</dd>" in text


@pytest.mark.parametrize("steps", [1, 30])
def test_one_loss_has_no_interval(make_run, steps):
    text = write_report(make_run(90, [record(step) for step in range(1, 1 + steps)])).read_text()
    (said,) = re.findall("Training loss .*? over the last [^;.]*", text)
    assert ("±" in said) == (steps > 1) and "nan" not in said


@pytest.mark.parametrize("sources, drawn", [(["one"], 0), (["one", "two"], 1)])
def test_losses_by_source_need_two_sources(make_run, sources, drawn):
    text = write_report(make_run(60, [record(step, sources) for step in range(1, 61)])).read_text()
    assert "<dt>bits per byte</dt><dd>1.500</dd>" in text and "<th>bits per byte</th>" in text
    assert text.count("<figcaption>Loss by source, nats per token</figcaption>") == drawn


def test_rates_that_were_recorded_are_drawn(page):
    text = page.read_text()
    for title in ("Learning rate", "Gradient norm", "Tokens a second"):
        assert f"<figcaption>{title}</figcaption>" in text
    assert "(MFU)" not in text
    assert f"Python {platform.python_version()}" in text


def test_deep_models_show_six_layers(make_run):
    records = [record(step) for step in range(1, 21)]
    for step in (10, 20):
        for layer in range(1, 31, 2):
            records[step - 1] |= load_of(layer, [1 / 8] * 8)
    text = write_report(make_run(20, records)).read_text()
    assert re.findall(r"<figcaption>Layer (\d+), over training", text) == ["1", "7", "13", "17", "23", "29"]


def test_page_is_self_contained_and_escapes_text(page):
    text = page.read_text()
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    assert text.count("<script") == text.count('<script type="application/json" class="chart-data">') + 3
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<b>def f(&lt;b&gt;</b>x &amp; y): return &#x27;&lt;i&gt;&#x27;" in text


def test_an_html_parser_reads_the_page(page):
    check_page(page.read_text())


def test_samples_stay_with_the_run(page):
    again = write_report(page.parent)
    assert "def f(&lt;b&gt;" in again.read_text()


def test_page_of_150_000_steps_fits_5_mb(make_run):
    base = [json.dumps(record(step)) for step in range(1, 101)]
    run = make_run(150_000, [])
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(1, 150_001):
            file.write(base[step % 100].replace('"step": ', f'"step": {step}, "was": ', 1) + "\n")
    assert write_report(run).stat().st_size < 5e6


def test_what_cannot_be_reported_on_is_explained(make_run, tmp_path):
    with pytest.raises(ReportError, match="no such folder"):
        write_report(tmp_path / "nothing")
    with pytest.raises(ReportError, match="try again after its first step"):
        write_report(make_run(10, []))


def test_thinning_keeps_the_extremes_and_the_mean():
    y = np.sin(np.arange(100_000) / 500)
    y[54_321] = 9.0
    y[7] = np.nan
    thinned = thin(np.arange(100_000), y, points=300)
    assert len(thinned.x) == 300
    assert thinned.high.max() == 9.0
    assert thinned.low.min() < -0.999
    weights = np.diff(np.append(np.linspace(0, 99_999, 300, endpoint=False).astype(int), 99_999))
    assert np.average(thinned.mean, weights=weights) == pytest.approx(np.nanmean(y))


@pytest.mark.parametrize("low, high", [(0, 1), (2.31, 2.34), (0, 145_322), (1e-5, 2e-4)])
def test_axes_have_a_few_round_ticks_inside(low, high):
    values = ticks(low, high)
    assert 2 <= len(values) <= 9
    assert all(low - 1e-9 <= value <= high * (1 + 1e-9) for value in values)


def test_large_and_small_numbers_are_short():
    assert [short(v) for v in (300e9, 145_322, 0.5, 2e-5)] == ["300B", "145k", "0.5", "2e-5"]


def test_pictures_are_written_for_slides(make_run, tmp_path):
    write_report(make_run(60), pictures=tmp_path / "png")
    assert sorted(p.name for p in (tmp_path / "png").iterdir()) == ["experts.png", "loss.png", "mixture.png"]


def browse(page, tmp_path, width, probe):
    """Load the page in a real browser with a probe appended; returns what the probe wrote, and the console's errors."""
    probed = tmp_path / "probed.html"
    script = (
        f"<pre id=probe></pre><script>document.getElementById('probe').textContent=JSON.stringify({probe})</script>"
    )
    probed.write_text(page.read_text() + script)
    command = [BROWSER, *FLAGS, f"--user-data-dir={tmp_path}/profile", f"--window-size={width},900"]
    command += [
        "--enable-logging=stderr",
        "--log-level=0",
        "--virtual-time-budget=2000",
        "--dump-dom",
        f"file://{probed}",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "ERROR" in line.upper()]
    return json.loads(found[1].replace("&quot;", '"').replace("&gt;", ">").replace("&amp;", "&")), console


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
def test_charts_render_in_a_browser_and_on_phones(page, tmp_path):
    page.write_text(page.read_text().replace("<details>", "<details open>"))
    probe = """{charts: [...document.querySelectorAll('figure')].map(figure => {
          const chart = figure.querySelector('canvas') || figure.querySelector('svg');
          const { width, height } = chart.getBoundingClientRect();
          const shapes = chart.querySelectorAll('polyline,polygon,rect').length;
          return [width, height, chart.tagName == 'CANVAS' ? 1 : shapes];
        }),
        interactive: document.querySelectorAll('.uplot').length,
        readings: [...document.querySelectorAll('.u-legend tr:not(.quiet) .u-value')].map(each => each.textContent),
        wide: document.documentElement.scrollWidth, window: window.innerWidth}"""
    seen, console = browse(page, tmp_path, 500, probe)
    assert console == []
    assert len(seen["charts"]) >= 8
    for width, height, shapes in seen["charts"]:
        assert width > 300
        assert height > 50
        assert shapes > 0
    assert seen["interactive"] >= 5
    assert len(seen["readings"]) > seen["interactive"]
    assert "–" not in seen["readings"] and "200" in seen["readings"]  # the last values, where no pointer is
    assert seen["wide"] <= seen["window"]


@pytest.fixture
def browser(tmp_path):
    browser = Browser(tmp_path / "browser")
    yield browser
    browser.close()


def all_follow_pointer(browser, last, shift):
    """Move the pointer over the first chart; return whether no chart tells its last place any more."""
    box = browser.value("document.querySelector('.u-over').getBoundingClientRect().toJSON()")
    browser("Input.dispatchMouseEvent", type="mouseMoved", x=box["x"] + box["width"] / 2 + shift % 9, y=box["y"] + 40)
    time.sleep(0.05)
    places = "[...document.querySelectorAll('.u-legend tr:first-child .u-value')].map(each => each.innerText)"
    return last not in browser.value(places)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
def test_controls_change_all_charts_of_a_page(page, browser):
    browser.size(375, 800)
    browser("Page.navigate", url=page.as_uri())
    browser.wait("document.querySelectorAll('.uplot').length > 5")
    reading = "document.querySelectorAll('.u-legend')[0].innerText"
    before = browser.value(reading)
    assert before.startswith("step200training")
    use = "(label, fields) => { const one = document.querySelector(`.controls [aria-label='${label}']`);"
    use = f"const use = {use} Object.assign(one, fields); one.dispatchEvent(new Event('input')); }};"
    browser.value(
        f"{{ {use} use('by', {{value: 'tokens'}}); use('smooth', {{value: 0}}); use('log x', {{checked: true}}) }}"
    )
    last = record(200)
    browser.wait(f"{reading} !== {json.dumps(before)}")
    assert browser.value(reading).startswith(f"tokens409.6ktraining{last['loss']:.4f}"[:-1])
    assert browser.value("document.documentElement.scrollWidth") == 375
    browser.size(1280, 1600, dark=True)
    browser.wait("document.querySelector('.uplot').clientWidth > 400")
    assert any(all_follow_pointer(browser, last="409.6k", shift=shift) for shift in range(200))
    assert browser.errors == []


def test_the_page_shows_scores_beside_the_paper_s(make_run):
    run = make_run(20)
    for step in (10, 20):
        key = ScoringKey("hash", "piqa", "1", "data", "1", "float32", "separate", None, 2048)
        answers = {"acc": [1.0, 0.0] * 50}
        result = TaskResult(key, {"acc": 0.5 + step / 1000}, {"acc": 0.05}, 100, answers, 1.0)
        Evaluation("run", step, (result,)).write(RunFolder(run).evaluation(step))
    text = write_report(run).read_text()
    assert "BlackMamba 342M/1.5B, paper" in text
    assert "<td>0.690 (-3.4)</td>" in text


def test_the_configuration_shown_is_the_run_s(page):
    shown = re.search(r"<summary>Configuration</summary><pre>(.*?)</pre>", page.read_text(), re.DOTALL)[1]
    assert yaml.safe_load(shown.replace("&#x27;", "'"))["model"]["pattern"] == "MEME"


def test_curves_hold_scores_on_the_same_questions():
    def scored(step, data, limit=None):
        key = ScoringKey("hash", "piqa", "1", data, "1", "float32", "joint", limit, 2048)
        return TaskResult(key, {"acc": step / 100}, {"acc": 0.05}, limit or 100, {}, 1.0)

    found = [
        Evaluation("run", 10, (scored(10, "new", 20), scored(11, "old"))),
        Evaluation("run", 20, (scored(20, "new"),)),
        Evaluation("run", 30, (scored(30, "new", 20),)),
    ]
    assert points(found, "piqa").values.tolist() == [0.1, 0.3]
    assert points(found[:2], "piqa").steps.tolist() == [20]
