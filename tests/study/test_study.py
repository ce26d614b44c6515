"""Studies: equal FLOPs, learning rates chosen alike, confidence over seeds, and a run that goes on after Ctrl-C."""

import io
import json
import math
import re
import signal
import statistics
import subprocess
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest
import yaml
from rich.console import Console
from scipy import stats

from megatron_blackmamba.config import load
from megatron_blackmamba.config.load import config_folder
from megatron_blackmamba.console.progress import clock
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.plan import flops, parameters
from megatron_blackmamba.report.confidence import half_interval
from megatron_blackmamba.report.pictures import write_pictures
from megatron_blackmamba.study import StudyError, commands, corpus, page, progress
from megatron_blackmamba.study.commands import draw, open_study, run
from megatron_blackmamba.study.config import CorpusConfig, as_overrides, read_study, shipped
from megatron_blackmamba.study.machine import Machine
from megatron_blackmamba.study.options import HowToRun
from megatron_blackmamba.study.points import Evidence, Point, collect
from megatron_blackmamba.study.runs import Study, final_loss
from tests.pages import check_page
from tests.thorough import thorough


def finish(cell, loss):
    """Leave what a finished run leaves."""
    record = {"step": 1, "loss": loss, "validation/loss": loss, "validation/loss_balanced": loss + 0.1}
    record["validation/bits_per_byte"] = loss / 2
    record |= {"consumed_tokens": cell.config.training.tokens, "speed/tokens_per_second": 1000.0}
    atomic.write_text(cell.folder.metrics, json.dumps(record) + "\n")
    cell.folder.done.touch()


def paper(tmp_path):
    return Study("paper", read_study("paper"), tmp_path)


def test_study_variants_have_equal_size_and_cost(tmp_path):
    study = paper(tmp_path)
    cells = [cell for cell in study.runs(dict.fromkeys(study.config.variants, 1e-3)) if cell.seed == 1]
    for size in study.config.tokens:
        some = [cell.config for cell in cells if cell.kind == "run" and cell.size == size]
        active = [parameters.count(config).forward for config in some]
        assert max(active) < 1.06 * min(active)
        cost = [flops.training(c.model, c.data.sequence_length) * c.training.tokens for c in some]
        assert max(cost) < 1.01 * min(cost)
        assert len({config.optimizer.learning_rate for config in some}) == 1


def test_study_of_mixers_has_equal_flops():
    """Two of a mixer differ in experts alone, and a token costs all twelve models nearly the same."""
    study = read_study("mixers")
    configs = {v: load(study.base, as_overrides(study.set, keys["xs"])) for v, keys in study.variants.items()}
    cost = [flops.training(config.model, config.data.sequence_length) for config in configs.values()]
    assert max(cost) < 1.035 * min(cost)
    for name in (name for name in configs if not name.endswith("_experts")):
        dense, experts = (configs[each].model for each in (name, f"{name}_experts"))
        assert experts.pattern == 3 * (dense.pattern[0] + "E")
        assert dense.delta.variant == experts.delta.variant


def test_each_variant_uses_its_best_learning_rate(tmp_path):
    study = paper(tmp_path)
    assert study.learning_rates() is None
    for cell in study.tuning():
        rate = cell.config.optimizer.learning_rate
        finish(cell, abs(rate - (2e-3 if cell.group == "mamba" else 8e-3)))
    assert study.learning_rates() == {"blackmamba": 8e-3, "mamba": 2e-3, "transformer": 8e-3, "transformer_moe": 8e-3}
    runs = study.runs(study.learning_rates())
    assert len(runs) == 4 * 2 * 3 + 6 * 2
    assert {cell.config.optimizer.learning_rate for cell in runs if cell.group == "mamba"} == {2e-3}
    softmax = next(cell for cell in runs if cell.group == "softmax")
    assert (softmax.config.model.router.kind, softmax.config.optimizer.learning_rate) == ("softmax", 8e-3)


def test_without_tuning_the_base_names_the_rate(tmp_path):
    smoke = yaml.safe_load((config_folder() / "studies/smoke.yaml").read_text())
    del smoke["tuning"], smoke["ablations"]
    smoke["set"]["optimizer.learning_rate"] = 0.003
    (tmp_path / "idea.yaml").write_text(yaml.safe_dump(smoke))
    study = Study("idea", read_study(str(tmp_path / "idea.yaml")), tmp_path)
    assert study.tuning() == [] and study.learning_rates() == {"blackmamba": 0.003, "mamba": 0.003}


def result(group, seed, loss, kind="run", **more):
    given = {
        "variant": group,
        "size": "small",
        "seed": seed,
        "budget": 100,
        "flops": 1e9,
        "tokens": 100,
        "repeated": 0,
        "parameters": 10,
        "active": 5,
        "rate": 1e-3,
        "loss": loss,
        "training": loss,
        "validation": {},
        "bits_per_byte": {},
        "busiest": 1.5,
        "kind": kind,
        "balanced": loss + 0.1,
        "busiest_by_layer": {"1": 1.5},
        "curve": [(50, 5e8, loss), (100, 1e9, loss)],
        "tokens_per_second": 1.0,
        "memory_bytes": 1,
    }
    return Point(**(given | more))


def evidence(*results, **more):
    return Evidence("paper", "y", "blackmamba", 9, {}, results, **more)


def page_of(folder, *results):
    study, found = paper(folder), evidence(*results)
    return page.render(study, found, page.report(study, found))


def test_confidence_over_seeds_is_student_s(tmp_path):
    results = [result("blackmamba", seed, loss) for seed, loss in ((1, 1.0), (2, 2.0), (3, 3.0))]
    (group,) = page.grouped(results, "run")
    assert group.mean("loss") == 2.0
    assert half_interval(group.values("loss")) == pytest.approx(4.303 / 3**0.5)
    text = page_of(tmp_path, *results, result("mamba", 1, 2.5, busiest=None), result("x", 1, 2.0, "ablation"))
    check_page(text)
    assert "2.000 ± 2.484" in text
    assert "5 of 9 runs are finished" in text


def test_confidence_of_many_seeds_is_student_s_too():
    for count in (*range(2, 14), 21, 1001):
        values = [0.0, 2.0] * (count // 2) + [1.0] * (count % 2)
        low, high = stats.t.interval(0.95, count - 1, statistics.fmean(values), stats.sem(values))
        assert half_interval(values) == pytest.approx((high - low) / 2, rel=2e-4)


def test_diverged_run_has_no_validation_loss(tmp_path):
    cell = paper(tmp_path).tuning()[0]
    finish(cell, 3.0)
    diverged = json.loads(cell.folder.metrics.read_text()) | {"step": 2, "validation/loss": None}
    with open(cell.folder.metrics, "a") as file:
        file.write(json.dumps(diverged) + "\n")
    assert final_loss(cell) == math.inf
    found = collect(cell, {})
    assert math.isnan(found.loss) and [loss for _, _, loss in found.curve] == [3.0]
    assert "nan" in page_of(tmp_path, replace(found, kind="run", changed={}))


def test_models_are_compared_by_seed(tmp_path):
    """Two seeds move both models by 0.5; only the third seed is missing from one."""
    ours = [result("blackmamba", seed, loss) for seed, loss in ((1, 1.0), (2, 1.5), (3, 9.0))]
    others = [result("mamba", seed, loss) for seed, loss in ((2, 1.6), (1, 1.2))]
    text = page_of(tmp_path, *ours, *others)
    cells = re.sub("<[^>]+>", "|", text)
    assert "|blackmamba − mamba||small||-0.150 ± 0.635||-0.200, -0.100|" in cells


def test_page_begins_with_lowest_loss_and_its_interval(tmp_path):
    ours = [result("blackmamba", seed, loss) for seed, loss in ((1, 1.0), (2, 1.1))]
    others = [result("mamba", seed, loss) for seed, loss in ((1, 1.5), (2, 1.7))]
    text = page_of(tmp_path, *others, *ours)
    assert "blackmamba has the lowest validation loss, 1.050 ± 0.635 (2 seeds); mamba is 0.550 ± 0.635 above" in text
    (forest,) = re.findall(r"<figcaption>Size small, lowest first.*?</svg>", text)
    assert re.findall(r"<title>(.*?)</title>", forest) == ["blackmamba: 1.050 ± 0.635", "mamba: 1.600 ± 1.271"]
    assert text.index("lowest first") < text.index("<table>")


def test_charts_of_unfinished_studies_are_drawn(tmp_path):
    study, results = paper(tmp_path), [result("blackmamba", 1, 1.0), result("blackmamba", 2, 1.1)]
    results.append(result("mamba", 1, 1.5, size="large"))
    measured = [
        {"group": "a", "size": size, "lengths": [16, 64], "milliseconds": [1, 1], "bytes": [8, 8]}
        for size in ("small", "large")
    ]
    assert write_pictures(tmp_path / "none", page.report(study, evidence()).pictures) == []
    pictures = page.report(study, evidence(*results, generation=measured)).pictures
    assert [chart.title for chart in pictures["loss"]] == [
        *("Validation loss against training FLOPs", "Size small, nats per token", "Size large, nats per token")
    ]
    assert [chart.title for chart in pictures["generation"]] == ["large: ms a token, batch 1", "large: bytes of state"]
    drawn = write_pictures(tmp_path / "png", pictures)
    assert [path.name for path in drawn] == ["loss.png", "generation.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_results_of_earlier_versions_are_drawn(tmp_path, capsys):
    old = {"name": "x", "kind": "run", "group": "mamba", "size": "small", "seed": 1, "learning_rate": 1e-3}
    old |= {"parameters": 10, "active": 5, "tokens": 100, "flops": 1e9, "loss": 2.25, "validation": 2.5}
    old |= {"balanced": None, "tokens_per_second": 1.0, "memory_bytes": 1, "busiest": {}, "curve": [[100, 1e9, 2.5]]}
    tuned = [old | {"kind": "tuning", "learning_rate": rate} for rate in (1e-3, 2e-3)]
    (tmp_path / "results.json").write_text(json.dumps([*tuned, old]))
    assert run(paper(tmp_path), HowToRun(points=tmp_path / "results.json", page_only=True))
    said = capsys.readouterr().out
    assert re.search(r"mamba +small +2\.500 +– +2\.250", said)
    assert (tmp_path / "study.html").read_text().count("<td>0.002</td>") == 1


def test_corpus_is_deduplicated_and_split_by_document(tmp_path):
    lines: set[bytes] = set()
    page = "\n".join(f"a sentence that is long enough, number {i}" for i in range(20))
    changed = page + "\none more line at its end, of some length"
    other = page.replace("sentence", "paragraph")
    assert [*corpus._distinct(iter([page, page, changed, other]), lines, 10**6)] == [page, other]
    made = corpus.Corpus(tmp_path, CorpusConfig(megabytes=1, unseen=True))
    counts = made.gather()
    assert [*counts] == [*corpus.SOURCES, "manuals"]
    for source, parts in counts.items():
        texts = [(tmp_path / "text" / source / f"{part}.jsonl").read_text().splitlines() for part in parts]
        assert not set(texts[0]) & set(texts[1])
        assert [len(each) for each in texts] == [part["documents"] for part in parts.values()]


@pytest.mark.skipif(find_spec("datatrove") is None, reason="datatrove is not installed")
def test_near_duplicates_leave_the_corpus(tmp_path, monkeypatch):
    """Different lines hide from `_distinct` that two documents have nearly the same words."""
    words = [f"word{i}" for i in range(600)]
    near = "\n".join(" ".join(words[i : i + 10]) for i in range(0, 600, 10))
    again = "\n".join(" ".join(words[i : i + 15]) for i in range(0, 600, 15))
    others = [near.replace("word", name) for name in ("this", "that", "else")]
    monkeypatch.setattr(Machine, "code", lambda self: iter([near, again, *others[:1]]))
    monkeypatch.setattr(Machine, "prose", lambda self: iter(others[1:]))
    counts = corpus.Corpus(tmp_path, CorpusConfig(near_duplicates=True)).gather()
    documents = {source: sum(part["documents"] for part in parts.values()) for source, parts in counts.items()}
    assert documents == {"code": 2, "prose": 2}


@pytest.mark.parametrize("name", shipped())
def test_shipped_studies_are_read(name):
    assert read_study(name).about


def test_table_fits_a_terminal_of_80_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    runs = [result("transformer_moe", seed, 4.2 + seed / 10) for seed in (1, 2)]
    draw(evidence(*runs), paper(tmp_path), HowToRun())
    table = capsys.readouterr().out.partition(str(tmp_path))[0]
    assert "transformer_moe" in table and "4.350 ± 0.635" in table and "…" not in table


def test_wrong_studies_are_one_line(tmp_path):
    with pytest.raises(
        StudyError, match="no study 'papre': name a file, or one of confirm, length, mixers, muon, paper, smoke"
    ):
        read_study("papre")
    file = tmp_path / "mine.yaml"
    smoke = read_study("smoke").model_dump()
    for wrong, reason in (
        ({"tokens": {"large": 1}}, "has the sizes"),
        ({"tuning": smoke["tuning"] | {"size": "huge"}}, r"tuning\.size=huge is none of"),
        ({"ablations": {"other": {"of": "nothing", "size": "huge"}}}, r"ablations"),
    ):
        file.write_text(yaml.safe_dump(smoke | wrong))
        with pytest.raises(StudyError, match=rf"mine\.yaml: .*{reason}"):
            read_study(str(file))


def test_a_machine_without_text_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(Machine, "code", lambda self: iter(["only one document"]))
    with pytest.raises(StudyError, match="no text for the source 'code'"):
        corpus.Corpus(tmp_path, CorpusConfig(megabytes=1)).gather()


def test_study_shows_runs_with_step_and_time_left(tmp_path):
    study = Study("smoke", read_study("smoke"), tmp_path)
    first, second, third, *_ = cells = study.tuning()
    finish(first, 3.0)
    second.folder.root.mkdir(parents=True)
    second.folder.metrics.write_text('{"step": 7, "loss": 3.5, "speed/step_seconds": 2.0}\n{"step": 8, "lo')
    shown = progress.show(cells, lambda: [second, third])
    left = clock(2 * (second.config.steps - 7))
    said = shown._state().text
    assert said.startswith(f"1 of {len(cells)} runs done; {second.name} step 7 of {second.config.steps}, {left} left")
    assert said.endswith(f"{third.name} step 0 of {third.config.steps}, starting")
    console = Console(file=io.StringIO(), width=120)
    console.print(shown._table())
    drawn = console.file.getvalue()
    assert re.search(rf"{second.name} +7 of {second.config.steps} +3\.500 +{left} left", drawn), drawn


@thorough
@pytest.mark.xdist_group("pages")  # where a session runs
def test_interrupted_study_resumes_to_its_page(session, tmp_path):
    content = read_study("smoke").model_dump() | {"ablations": {}, "seeds": [1]}
    content["variants"].pop("mamba")
    content["tuning"]["learning_rates"] = [2e-3]
    content["tokens"] = {"small": 64 * 4 * 120}
    file = tmp_path / "short.yaml"
    file.write_text(yaml.safe_dump(content))
    folder = tmp_path / "study"
    for cell in Study("short", read_study(str(file)), folder).tuning():
        finish(cell, 3.0)
    words = session.command("study", file, "--folder", folder, "--jobs", "1")
    running = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=session.environment
    )
    steps = folder / "runs" / "run-blackmamba-small-seed1" / "metrics.jsonl"
    while running.poll() is None and not (steps.is_file() and steps.stat().st_size):
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate()
    assert running.returncode == 75, said
    taken = len(steps.read_text().splitlines())
    again = subprocess.run(words, env=session.environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    if taken < 120:  # or else the machine was too busy to interrupt it in time
        assert f"resumes after step {taken}" in (steps.parent / "log.txt").read_text()
    found = json.loads((folder / "results.json").read_text())["points"][-1]
    assert found["tokens"] == 64 * 4 * 120
    assert found["balanced"] != found["loss"]
    assert "blackmamba" in (folder / "study.html").read_text()


def test_study_trains_unless_only_its_page_is_asked(tmp_path):
    class Recorder:
        def train(self, cells):
            trained.extend(cells)
            return True

    study, trained = open_study("smoke", tmp_path), []
    cells = study.tuning()
    assert not commands._do(cells, study, HowToRun(page_only=True), Recorder()) and trained == []
    assert commands._do(cells, study, HowToRun(), Recorder()) and trained == cells


def test_what_cannot_train_is_refused_before_the_corpus(tmp_path):
    smoke = yaml.safe_load((config_folder() / "studies/smoke.yaml").read_text())
    smoke["corpus"] = {"vocabulary": 4096, "megabytes": 1}
    (tmp_path / "idea.yaml").write_text(yaml.safe_dump(smoke))
    study = open_study(str(tmp_path / "idea.yaml"), tmp_path / "out")
    with pytest.raises(StudyError, match=r"the corpus is 4096, and model.vocab_size of \w+ 300.*vocabulary: 300"):
        commands.run(study, HowToRun())
    with pytest.raises(StudyError, match="--budget is for studies on trunks"):
        commands.run(study, HowToRun(budget=0))
    assert not study.corpus.folder.exists()
