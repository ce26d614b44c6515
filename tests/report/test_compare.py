"""Runs in one table, and runs side by side at equal tokens and equal FLOPs."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from datetime import datetime

import numpy as np
import pytest
import yaml
from rich.console import Console

from megatron_blackmamba.config import load, to_yaml
from megatron_blackmamba.formats.evaluations import Evaluation, ScoringKey, TaskResult
from megatron_blackmamba.formats.events import Resumed
from megatron_blackmamba.formats.run_folder import MANIFEST, RunFolder
from megatron_blackmamba.report import ReportError
from megatron_blackmamba.report.comparison_answer import answer
from megatron_blackmamba.report.comparison_figures import bootstrap, common_end, paired, read_all, short_names
from megatron_blackmamba.report.comparison_page import compare, render, tables
from megatron_blackmamba.report.history import read_history
from megatron_blackmamba.report.overview import Overview, overviews, show
from megatron_blackmamba.report.page import render as render_run
from tests.pages import check_page
from tests.serving.browser import BROWSER, Browser

SHARES = {"code": "3/4", "prose": "1/4"}


def write_run(root, steps, pattern="MEME", loss=lambda step: 5.0 - step / 100, shares=SHARES, **plan):
    root.mkdir()
    (root / "config.yaml").write_text(to_yaml(load("tiny", [f"model.pattern={pattern}", "training.tokens=204800"])))
    (root / "data_plan.json").write_text(json.dumps({"phases": [{"from_sample": 0, "shares": shares}], **plan}))
    with open(root / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            record = {"step": step, "loss": loss(step), "consumed_samples": 16 * step, "consumed_tokens": 2048 * step}
            record |= {"speed/step_seconds": 36.0, "speed/tokens_per_second": 57.0, "speed/memory_bytes": 2**30}
            if step % 10 == 0:
                record |= {f"validation/loss/{name}": loss(step) + i for i, name in enumerate(shares)}
                record |= {f"validation/bits_per_byte/{name}": loss(step) / 2 + i for i, name in enumerate(shares)}
            file.write(json.dumps(record) + "\n")
    return root


def scored(run, answers, data="1", encoding="joint"):
    key = ScoringKey(run.name, "piqa", "1", data, "1", "float32", encoding, None, 2048)
    mean = float(np.mean(answers))
    result = TaskResult(key, {"acc": mean}, {"acc": 0.05}, len(answers), {"acc": answers}, 1.0)
    Evaluation(str(run), 60, (result,)).write(RunFolder(run).evaluation(60))


@pytest.fixture
def two(tmp_path):
    first = write_run(tmp_path / "first", 60)
    second = write_run(tmp_path / "second", 40, "MM", loss=lambda step: 4.0 - step / 100)
    scored(first, [1.0, 0.0] * 100)
    scored(second, [1.0, 1.0, 1.0, 0.0] * 50)
    return first, second


def test_losses_are_compared_at_equal_tokens_and_flops(two):
    a, b = read_all(two)
    tokens = common_end([a, b], "tokens")
    assert tokens == 40 * 2048
    assert a.averaged_loss("tokens", tokens) == (pytest.approx(4.6 + 0.015), 4)  # steps 37 to 40
    assert b.validation_at("tokens", tokens) == pytest.approx(3.6 + 0.25)
    assert a.flops_per_token > b.flops_per_token
    shared = common_end([a, b], "flops")
    assert shared == 40 * 2048 * b.flops_per_token
    step = shared / a.flops_per_token / 2048
    assert a.averaged_loss("flops", shared)[0] == pytest.approx(5 - step / 100, abs=0.02)
    assert a.along("hours", np.array([50]))[0] == pytest.approx(0.5)


def test_interpolated_validation_losses_are_marked(two):
    a, b = read_all(two)
    assert a.validated_at("tokens", 40 * 2048) and not a.validated_at("tokens", 39 * 2048)
    rows = {row[0]: row[1:] for row in {title: rows for title, _, rows in tables([a, b])}["Results"]}
    of = {
        axis: next(cells for name, cells in rows.items() if "validation loss at" in name and axis in name)
        for axis in ("tokens", "FLOPs")
    }
    assert not any("interpolated" in cell for cell in of["tokens"])
    assert ["(interpolated)" in cell for cell in of["FLOPs"]] == [True, False]


@pytest.mark.parametrize("steps, averaged", [(1, 1), (50, 5), (300, 20), (900, 20), (2000, 40)])
def test_short_runs_average_more_of_their_steps(tmp_path, steps, averaged):
    run, _ = read_all([write_run(tmp_path / "run", steps, shares={})] * 2)
    assert run.averaged_loss("tokens", 2048 * steps)[1] == averaged


def test_validation_losses_have_one_weighting(tmp_path):
    first = write_run(tmp_path / "first", 40, tokenizer={"name": "a", "sha256": "a" * 64})
    shares = {"code": "1/4", "prose": "1/4", "maths": "1/2"}
    second = write_run(tmp_path / "second", 40, shares=shares, tokenizer={"name": "b", "sha256": "b" * 64})
    runs = read_all([first, second])
    assert [run.validation_at("tokens", 40 * 2048) for run in runs] == pytest.approx([4.6 + 0.25] * 2)
    bits = [run.validation_at("tokens", 40 * 2048, bits=True) for run in runs]
    assert bits == pytest.approx([2.3 + 0.25] * 2)
    rows = {row[0]: row[1:] for row in {title: rows for title, _, rows in tables(runs)}["Results"]}
    assert next(cells for name, cells in rows.items() if "bits per byte, at 81.9k" in name) == ["2.5500"] * 2
    assert "weighted by the mixture of first" in render(runs) and "Validation, bits per byte" in render(runs)
    rows = {title: rows for title, _, rows in tables(runs)}["Configuration that differs"]
    assert [cells[1:] for cells in rows if cells[0].startswith("tokenizer")] == [["a aaaaaaaaaaaa", "b bbbbbbbbbbbb"]]
    other = write_run(tmp_path / "other", 40, shares={"poems": "1"})
    assert "Each run weighted by its own mixture" in render(read_all([first, other]))
    unvalidated = write_run(tmp_path / "unvalidated", 40, shares={})
    assert [run.validation is None for run in read_all([unvalidated, first])] == [True, False]
    assert "Weighted by the mixture." in render(read_all([unvalidated, first]))
    alone = read_all([second, second])[0]
    assert alone.validation_at("tokens", 40 * 2048) == pytest.approx(4.6 + 0.25 + 1)


def test_the_page_and_the_tables_show_what_differs(two, tmp_path):
    found = {title: rows for title, _, rows in tables(read_all(two))}
    assert found["Configuration that differs"] == [["model.pattern", "MEME", "MM"]]
    assert found["Scores on the same questions"][0][:3] == ["piqa acc", "second − first", "+0.2500"]
    console = Console(record=True, width=200, file=io.StringIO())
    text = compare(two, tmp_path / "compare.html", console).read_text()
    check_page(text)
    assert text.count('class="chart-data">') == 5  # training, validation, two sources, a score
    axes = json.loads(re.search(r'id="axes">(.*?)</script>', text)[1])
    assert [set(run) for run in axes] == [{"tokens", "training FLOPs", "step", "hours"}] * 2
    assert axes[1]["hours"][-1] == 0.4 and axes[1]["step"][-1] == 40
    assert "second is ahead of first in validation loss, by 1.0000 at 81.9k tokens" in text
    assert "second is ahead of first" in console.export_text(clear=False)
    assert "Scores over tokens" in text and "piqa acc" in text
    (row,) = [row for row in found["Results"] if row[0] == "training loss at 81.9k tokens, mean of the last steps"]
    assert row[1:] == ["4.6150 (4 steps)", "3.6150 (4 steps)"]
    assert compare(two, None, console) == tmp_path / "compare.html"
    assert "model.pattern" in console.export_text()
    with pytest.raises(ReportError, match="at least two runs"):
        read_all(two[:1])


def test_noise_as_large_as_the_lead_decides_nothing(tmp_path):
    """The same batches add the same noise to both runs; other batches do not."""
    noise = np.random.default_rng(1).standard_normal((2, 61))
    first = write_run(tmp_path / "first", 60, loss=lambda step: 5 + noise[0, step])
    same = write_run(tmp_path / "same", 60, loss=lambda step: 5.01 + noise[0, step])
    other = write_run(tmp_path / "other", 60, loss=lambda step: 5.01 + noise[1, step])
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("seed: 1234", "seed: 2"))
    for run in (first, same, other):  # validated without noise
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        loss = {"validation/loss/code": 5.0 + (run != first) / 100, "validation/loss/prose": 5.0}
        (run / "metrics.jsonl").write_text("".join(json.dumps(each | loss) + "\n" for each in lines))
    assert answer(read_all([first, same]))[0].startswith("first is ahead of same in validation loss, by 0.0075")
    assert answer(read_all([first, same]))[0].endswith("by 0.0100 ± 0.0000 (95% interval).")
    assert answer(read_all([other, first]))[0].startswith("first is not clearly ahead of other")


def test_unknown_flops_leave_the_answer_to_tokens(two):
    """A router from outside, without its module: no FLOPs, and still an answer."""
    config = two[0] / "config.yaml"
    content = yaml.safe_load(config.read_text())
    content["model"]["router"] = content["model"].get("router", {}) | {"kind": "from_outside"}
    config.write_text(yaml.safe_dump(content))
    said = answer(read_all(two[::-1]))[0]
    assert said.startswith(
        "second is ahead of first in validation loss, by 1.0000 at 81.9k tokens (where first had not ended)"
    )


def test_answers_name_the_loss_of_each_axis(tmp_path):
    """At equal FLOPs one run had not ended, and was not validated: its training loss there does not turn the answer."""
    falling = write_run(tmp_path / "first", 40, loss=lambda step: 6.0 - step / 20)
    runs = falling, write_run(tmp_path / "second", 40, "MM", loss=lambda step: 4.3 - step / 1000)
    for run in runs:
        *lines, last = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        kept = [{key: value for key, value in line.items() if not key.startswith("validation")} for line in lines]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*kept, last]))
    said = answer(read_all(runs))[0]
    assert re.match(r"first is ahead of second in validation loss, by \d\.\d+ at 81\.9k tokens", said)
    assert re.search(r"and behind by \d\.\d+ in training loss at \S+ FLOPs \(where first had not ended\)", said)


def test_long_names_lose_what_they_share():
    assert short_names(["softmax-xs-seed2-learning_rate", "mamba-xs-seed2-learning_rate"]) == ["softmax", "mamba"]
    assert short_names(["base", "base_2"]) == ["base", "base_2"]
    assert short_names(["a_very_long_name_of_a_run", "a_very_long_name_of_a_run_2"]) == ["run", "run_2"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
def test_axis_of_comparison_is_switched_on_phones(two, tmp_path):
    """40 steps of 36 seconds, and 60 of them."""
    page = compare(two, tmp_path / "compare.html", Console(file=io.StringIO()))
    browser = Browser(tmp_path / "browser")
    try:
        browser.size(375, 800)
        browser("Page.navigate", url=page.as_uri())
        browser.wait("document.querySelectorAll('.uplot').length === 5")
        browser.value("""{ const by = document.querySelector('.controls select'); by.value = 'hours';
            by.dispatchEvent(new Event('input')) }""")
        browser.wait("document.querySelector('.u-legend').innerText.startsWith('hours0.6')")
        assert browser.value("document.documentElement.scrollWidth") == 375
        assert browser.errors == []
    finally:
        browser.close()


def test_changes_during_a_run_are_listed(two, tmp_path):
    def resumed(step, *changes):
        event = Resumed(step=step, sample=16 * step, steps_left=9, tokens_per_step=2048, changes=changes)
        return event.to_json(datetime.now()) + "\n"

    lost = resumed(45, "training.tokens: 1 from step 46 on, 163840 before")  # stopped before the next checkpoint
    lasting = [f"training.tokens: {tokens} from step {step} on" for step, tokens in ((36, 163840), (46, 204800))]
    RunFolder(two[0]).events.write_text(resumed(35, lasting[0]) + lost + resumed(45, lasting[1]) + resumed(50))
    runs = read_all(two)
    table = {title: rows for title, _, rows in tables(runs)}["Configuration changed during a run"]
    assert table == [["first", change] for change in lasting]
    console = Console(record=True, width=200, file=io.StringIO())
    page = compare(two, None, console).read_text()
    for text in (page, console.export_text()):
        assert all(change in text for change in lasting)
    assert "Configuration changed" not in render(runs[1:] * 2)


def test_scores_on_other_questions_are_not_paired(two):
    a, b = read_all(two)
    assert paired(a.scores, b.scores)[0].clear
    scored(two[1], [1.0] * 200, data="2")
    b = read_all(two)[1]
    assert paired(a.scores, b.scores) == []


def test_bootstrap_agrees_with_the_normal_interval():
    random = np.random.default_rng(1)
    for differences in (random.choice([-1.0, 0.0, 1.0], 400, p=[0.1, 0.6, 0.3]), random.normal(0.1, 1.0, 400)):
        low, high, p = bootstrap(differences)
        error = 1.96 * differences.std() / 20
        assert low == pytest.approx(differences.mean() - error, abs=0.2 * error)
        assert high == pytest.approx(differences.mean() + error, abs=0.2 * error)
        assert (p < 0.05) == (low > 0 or high < 0)


def test_runs_lists_states_and_losses(two, tmp_path):
    RunFolder(two[1]).done.touch()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_text(to_yaml(load("tiny")))
    found = {one.name: one for one in overviews(tmp_path)}
    assert found["first"].state == "training"
    assert (found["first"].step, found["first"].steps) == (60, 100)
    assert found["first"].seconds_left == 40 * 36
    assert found["second"].state == "finished"
    assert found["second"].evaluations == 1
    assert found["new"].state == "not started"
    assert found["second"].validation is None  # not measured
    with open(two[1] / "metrics.jsonl", "a") as file:
        for step, loss in ((41, 3.5), (42, None)):
            file.write(json.dumps({"step": step, "validation/loss": loss}) + "\n")
            file.flush()
            assert overviews(two[1])[0].validation == loss  # None: not finite
    long_ago = time.time() - 10_000
    os.utime(two[0] / "metrics.jsonl", (long_ago, long_ago))
    assert overviews(two[0])[0].state == "stopped"
    with pytest.raises(ReportError, match="no such folder"):
        overviews(tmp_path / "none")


def test_runs_list_launched_and_configless_runs(two, tmp_path):
    (tmp_path / "queued/launch/001").mkdir(parents=True)
    (tmp_path / "queued/launch/001/job.sbatch").touch()
    (two[0] / "config.yaml").unlink()
    found = {one.name: one for one in overviews(tmp_path)}
    assert found["queued"].state == "launched" and found["queued"].step is None
    assert found["first"].step == 60 and found["first"].steps is None
    with pytest.raises(ReportError, match="queued was launched but has not begun: look at squeue"):
        read_history(tmp_path / "queued")
    (tmp_path / "queued/config.yaml").write_text(to_yaml(load("tiny")))  # a job of it has begun
    assert overviews(tmp_path / "queued")[0].state == "not started"


def test_emptied_metrics_of_run_that_saved_are_named(two):
    (two[0] / "metrics.jsonl").write_text("")
    with pytest.raises(ReportError, match="try again after its first step"):
        read_history(two[0])
    (two[0] / MANIFEST).touch()
    with pytest.raises(ReportError, match="an imported model or a checkpoint has no training"):
        read_history(two[0])
    (two[0] / "done").touch()
    with pytest.raises(ReportError, match="has no steps, although the run has saved"):
        read_history(two[0])


def test_start_that_trained_nothing_is_no_interruption(two):
    record_event(two[0], "resumed", sample=16, step=40, steps_left=60, tokens_per_step=2048)
    record_event(two[0], "resumed", sample=16, step=60, steps_left=0, tokens_per_step=2048)
    assert read_history(two[0]).restarts == [40]


def test_runs_list_a_run_one_folder_deeper(tmp_path):
    (tmp_path / "runs/quickstart").mkdir(parents=True)
    write_run(tmp_path / "runs/quickstart/quickstart", 10)
    (tmp_path / "runs/mine").mkdir()
    write_run(tmp_path / "runs/plain", 10)
    write_run(tmp_path / "runs/plain/inside", 10)
    assert [run.name for run in overviews(tmp_path / "runs")] == ["plain", "quickstart/quickstart"]


def record_event(run, kind, **fields):
    with open(run / "events.jsonl", "a") as file:
        file.write(json.dumps({"time": "2026-01-31T12:00:00.000+00:00", "step": 60, "kind": kind, **fields}) + "\n")


@pytest.mark.parametrize("kind, state", [("stopped", "stopped"), ("failed", "failed"), ("gave_up", "gave up")])
def test_runs_show_how_a_run_ended(two, kind, state):
    record_event(two[0], "started")
    assert overviews(two[0])[0].state == "training"
    record_event(two[0], kind)
    record_event(two[0], "shards_unverified")
    assert overviews(two[0])[0].state == state
    (two[0] / "requeue").touch()
    assert overviews(two[0])[0].state == "stopped"  # by Ctrl-C: nothing goes on by itself
    (two[0] / "logs").mkdir()
    (two[0] / "logs/running_job").write_text("7\n")
    assert overviews(two[0])[0].state == "requeue"
    (two[0] / "requeue").unlink()
    record_event(two[0], "resumed")
    assert overviews(two[0])[0].state == "training"


@contextlib.contextmanager
def held_lock(run):
    """Hold the lock of a run in another process."""
    hold = f"from megatron_blackmamba.training.keep.lock import *\nheld = Lock(Path({str(run / 'lock')!r}))\n"
    hold += "print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        yield
        holder.kill()


def test_runs_show_a_killed_run_as_stopped(two):
    """The lock tells at once, although the last record is new and no event says that the run has ended."""
    record_event(two[0], "started")
    with held_lock(two[0]):
        long_ago = time.time() - 10_000
        os.utime(two[0] / "metrics.jsonl", (long_ago, long_ago))
        assert overviews(two[0])[0].state == "training"
    os.utime(two[0] / "metrics.jsonl")
    assert overviews(two[0])[0].state == "stopped"


def test_runs_trust_no_free_lock_of_another_host(two):
    (two[0] / "lock").write_text("process 1 on another-host\n")
    assert overviews(two[0])[0].state == "training"


def test_comparison_shows_the_number_of_processes(two):
    record_event(two[0], "started", steps=100, tokens_per_step=2048, processes=2)
    record_event(two[0], "resumed", sample=16, steps_left=99, tokens_per_step=2048, processes=2)
    record_event(two[0], "resumed", sample=32, steps_left=98, tokens_per_step=2048, processes=4)
    record_event(two[1], "started", steps=100, tokens_per_step=2048)  # an older version's
    results = tables(read_all(two))[0][2]
    assert ["processes", "2, 4", "not recorded"] in results


def test_runs_without_validation_by_then_say_so(tmp_path):
    early, more = write_run(tmp_path / "early", 5), write_run(tmp_path / "more", 40, shares={**SHARES, "maths": "1/4"})
    other = write_run(tmp_path / "other", 40)  # of another mixture, so that bits per byte are averaged here
    of = {name: cells for name, *cells in tables(read_all([early, more, other]))[0][2]}
    validated = {name: cells for name, cells in of.items() if "validation" in name}
    assert len(validated) == 4  # losses and bits per byte, at equal tokens and equal FLOPs
    assert all(cells == ["not validated by then"] * 3 for cells in validated.values())


def test_records_are_read_without_module_of_the_layers(two, tmp_path):
    """Only the FLOPs need it."""
    config = two[0] / "config.yaml"
    config.write_text(config.read_text().replace("pattern: MEME", "pattern: MXMX"))
    (shown,) = overviews(two[0])
    assert (shown.step, shown.steps) == (60, 100)
    assert "Loss" in render_run(read_history(two[0]))
    page, of = render(read_all(two)), {name: cells for name, *cells in tables(read_all(two))[0][2]}
    assert of["training FLOPs"] == ["not known: name the module of its own kinds in BLACKMAMBA_IMPORT", "5.31e+10"]
    assert "training loss at 81.9k tokens, mean of the last steps" in of
    assert not any("FLOPs" in name for name in of if name != "training FLOPs")
    axes = json.loads(re.search(r'id="axes">(.*?)</script>', page)[1])
    assert [set(run) for run in axes] == [{"tokens", "step", "hours"}] * 2


LONG = Overview("study/tuning-mamba-large/seed1", "training", 23, 297_620, 2_818_048, 3.7123, 4.0312, 16_334.0, 61.0, 2)


@pytest.mark.parametrize(
    "width, columns",
    [
        (130, ["run", "state", "step", "tokens", "loss", "validation", "tokens/s", "to go", "scores"]),
        (90, ["run", "state", "step", "loss", "validation", "tokens/s", "to go"]),
        (80, ["run", "state", "step", "loss", "tokens/s", "to go"]),
        (60, ["run", "state", "step"]),
        (20, ["run", "state"]),
    ],
)
def test_narrow_table_drops_columns_but_no_digit(width, columns):
    console = Console(width=width, file=io.StringIO())
    show([LONG], console)
    header, row = console.file.getvalue().splitlines()
    assert header.split() == " ".join(columns).split()
    assert row.startswith("study/tuning-mamba-large/seed1 training")
    assert ("step" not in columns or "23 of 297,620" in row) and (width < 50 or len(row) <= width)


def test_runs_skip_saved_weights(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/config.yaml").write_text(to_yaml(load("tiny")))
    (tmp_path / "weights/manifest.json").write_text("{}")
    write_run(tmp_path / "run", 10)
    assert [run.name for run in overviews(tmp_path)] == ["run"]


@pytest.fixture
def queued(tmp_path, monkeypatch):
    """A run that was launched ten minutes ago, and what `squeue` prints."""
    launch = tmp_path / "runs/queued/launch/001"
    launch.mkdir(parents=True)
    (launch / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --job-name=queued-12345678\n#SBATCH --nodes=2\n")
    os.utime(launch / "job.sbatch", (time.time() - 600,) * 2)
    (tmp_path / "runs/queued/logs").mkdir()
    squeue = tmp_path / "squeue"

    def answer(text: str, code: int = 0) -> Overview:
        squeue.write_text(f"#!/bin/sh\nprintf '{text}'\nexit {code}\n")
        squeue.chmod(0o755)
        return overviews(tmp_path / "runs")[0]

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return answer


def test_job_that_ended_early_is_no_longer_launched(queued, tmp_path):
    logs = tmp_path / "runs/queued/logs"
    assert queued("other\nqueued-12345678\n").state == "launched"
    assert queued("", code=1).state == "launched"  # Slurm does not answer
    assert queued("other\n").state == "stopped"  # cancelled while it waited
    (logs / "7.log").touch()
    found = queued("other\n")
    assert (found.state, found.problem) == ("failed", f"its last job ended before the first step: {logs / '7.log'}")
    assert queued("queued-12345678\n").state == "launched"  # requeued


def test_failed_job_s_marker_lasts_until_next_start(queued, two, tmp_path):
    for folder in (tmp_path / "runs/queued", two[0]):
        (folder / "requeue").touch()
        (folder / "failed").write_text("job 7 ended with exit code 1\n")
        found = overviews(folder)[0]
        assert (found.state, found.problem) == ("failed", "job 7 ended with exit code 1")
    console = Console(width=80, file=io.StringIO())
    show([found], console)
    assert console.file.getvalue().splitlines()[-1] == "first: job 7 ended with exit code 1"


def test_script_s_run_that_failed_is_listed(tmp_path):
    (tmp_path / "mine/logs").mkdir(parents=True)
    (tmp_path / "mine/logs/running_job").write_text("7\n")
    (tmp_path / "mine/failed").touch()  # on a full disk
    assert [(run.name, run.state, run.problem) for run in overviews(tmp_path)] == [
        ("mine", "failed", "its last job failed")
    ]


def test_training_run_that_cannot_record_says_so(two):
    with held_lock(two[0]):
        assert overviews(two[0])[0].problem is None
        (two[0] / "metrics.jsonl.waiting").touch()
        found = overviews(two[0])[0]
        assert found.state == "training" and found.problem.startswith("records cannot be written: is the disk full?")
        (two[0] / "metrics.jsonl.waiting").unlink()
        for name in ("metrics.jsonl", "lock"):
            os.utime(two[0] / name, (time.time() - 7200,) * 2)
        found = overviews(two[0])[0]
        assert (found.state, found.problem) == ("training", "no step recorded for 120 min")


def test_scores_of_different_encodings_are_marked(two):
    assert "encoding" not in str({title: rows for title, _, rows in tables(read_all(two))}["Scores"])
    scored(two[1], [1.0] * 200, encoding="separate")
    assert "(separate encoding)" in str({title: rows for title, _, rows in tables(read_all(two))}["Scores"])
