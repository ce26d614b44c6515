"""Studies on trunks and branches: a branch is a whole run with the same schedule, and laws are found where they are."""

import io
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import yaml

from megatron_blackmamba.config import to_yaml
from megatron_blackmamba.formats.evaluations import read_run
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.formats.step_records import last_value, metrics_so_far
from megatron_blackmamba.report.pictures import write_pictures
from megatron_blackmamba.runtime.exits import STOPPED_ON_REQUEST
from megatron_blackmamba.runtime.signals import StopRequest
from megatron_blackmamba.study import StudyError, afford, commands, length, page, worker
from megatron_blackmamba.study.commands import open_study, run
from megatron_blackmamba.study.config import RATE, LengthConfig, read_study
from megatron_blackmamba.study.execute import Local
from megatron_blackmamba.study.options import HowToRun
from megatron_blackmamba.study.points import Evidence, Point
from megatron_blackmamba.study.runs import Study
from studies import fits, routing, trend
from tests.docs.session import ROOT
from tests.pages import check_page
from tests.thorough import thorough

SMALL = {"model.pattern": "ME", "model.hidden_size": 16, "model.expert_hidden_size": 16, "model.experts": 4}
DENSE = {"model.pattern": "M-", "model.hidden_size": 16, "model.mlp_hidden_size": 16}
STUDY = {
    "about": "Do branches work?",
    "base": ["training/quickstart"],
    "set": {
        "data.sequence_length": 64,
        "training.global_batch": 4,
        "training.micro_batch": 4,
        "training.evaluate_every": 1_000_000,
        "training.evaluate_batches": 1,
        "training.router_every": 1,
        "optimizer.warmup_tokens": 512,
        "model.vocab_size": 300,
        "logging.tensorboard": False,
    },
    "corpus": {"vocabulary": 300, "megabytes": 1, "unseen": True},
    "variants": {"experts": {"small": SMALL}, "dense": {"small": DENSE}},
    "tokens": {"small": [2_560, 5_120]},
    "tuning": {"size": "small", "learning_rates": [4.0e-3]},
    "series": [{"sizes": ["small"], "seeds": [1], "variants": ["experts"]}, {"sizes": ["small"], "seeds": [1]}],
}


def page_of(study, found):
    return page.render(study, found, trend.report(study, found))


def study_of(folder, **changes):
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(STUDY | changes, sort_keys=False))
    return Study("mine", read_study(str(file)), folder)


@thorough
def test_branch_is_the_whole_run_with_its_schedule(tmp_path, capsys):
    study = study_of(tmp_path)
    study.corpus.build()
    cells = [cell for cell in study.runs(study.learning_rates()) if cell.group == "experts"]
    longest = cells[-1].config
    whole = longest.model_copy(update={"name": "whole", "start": type(longest.start)()})
    assert longest.start.branch.endswith("trunk-experts-small-seed1@16")
    paths = []
    for config in [each for cell in cells for each in (cell.trunk, cell.config)] + [whole]:
        paths.append(tmp_path / f"{len(paths)}.yaml")
        paths[-1].write_text(to_yaml(config))
    command = [sys.executable, "-m", "megatron_blackmamba.study.worker", *map(str, paths)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = Evidence.of(study, cells=cells)
    assert [(point.budget, point.tokens) for point in found.points] == [(2_560, 2_560), (5_120, 5_120)]
    metrics = [*tmp_path.glob("runs/*experts*/metrics.jsonl")]
    spent = sum(record["speed/step_seconds"] for path in metrics for record in metrics_so_far(path))
    assert len(metrics) == 3 and sum(point.seconds for point in found.points) == pytest.approx(spent)
    records = list(metrics_so_far(RunFolder(tmp_path / "runs" / "whole").metrics))
    assert found.points[1].loss == last_value(records, "validation/loss")
    manuals = study.corpus.folder / "tokens" / "manuals" / "validation"
    tokenizer = tokenizers.Tokenizer.from_file(str(manuals / "tokenizer.json"))
    read = np.fromfile(next(manuals.glob("*.bin")), np.uint16)[1:257]  # the labels of one batch
    spelled = sum(len(tokenizer.id_to_token(token)) for token in read.tolist() if token != 0)  # 0 ends documents
    bits = records[-1]["validation/loss/manuals"] * len(read) / math.log(2)
    assert records[-1]["validation/bits_per_byte/manuals"] == pytest.approx(bits / spelled)
    point = found.points[0]
    assert point.validation.keys() == {"code", "prose", "manuals"} and point.repeated == 0 and point.busiest >= 1
    counts = found.corpus["manuals"]["validation"]
    bits = point.validation["manuals"] / math.log(2) * counts["tokens"] / counts["bytes"]
    assert point.bits_per_byte["manuals"] == pytest.approx(bits)
    _is_read_beyond_its_length(study, cells[:1])
    _is_not_trained_again(study, cells, found, tmp_path / "points.json")
    check_page(page_of(study, Evidence.read(tmp_path / "points.json", study)))
    _routers_are_looked_at(study, cells, capsys)


def _routers_are_looked_at(study, cells, capsys):
    """On this validation text, once, also when --budget pays for no more; balanced in training is another loss."""
    study_of(study.folder)  # its file
    capsys.readouterr()
    for _ in range(2):
        assert run(open_study(str(study.folder / "mine.yaml"), study.folder), HowToRun(budget=0)) is False
    said = [line for line in capsys.readouterr().err.splitlines() if "routing of" in line]
    assert said == [f"blackmamba: routing of {cell.name}" for cell in cells]
    found = Evidence.of(study, cells=cells).points[-1].router
    assert found.keys() == routing.MEANING.keys()
    assert 0 < found["own"] < 1 <= found["busiest"] and found["loss"] != found["balanced"]
    assert 0 < found["entropy"] < 1 and 0 <= found["sources"] < 1


def _is_not_trained_again(study, cells, found, path):
    """Points of a file count as finished on another machine, if corpus and settings are the same."""
    found.write(path)
    known = Evidence.read(path, study)
    every = study.runs(study.learning_rates())
    assert known == found and known.unlike(study) is None
    assert [known.has(cell) for cell in every] == [cell.group == "experts" for cell in every]
    elsewhere = Study(study.name, study.config, study.folder / "elsewhere")
    assert Evidence.of(elsewhere, known).points == found.points
    assert known.unlike(elsewhere) == f"has points of another corpus than {elsewhere.corpus.folder}"
    tuning = study.config.tuning.model_copy(update={"learning_rates": [2e-3]})
    faster = Study(study.name, study.config.model_copy(update={"tuning": tuning}), study.folder)
    older = replace(known, settings={})  # a file without them
    assert older.unlike(faster) == "has experts-small-seed1-2560 with other settings than this study"
    study_of(study.folder, tuning=tuning.model_dump())
    with pytest.raises(StudyError, match=r"points\.json has points of other settings .*rates differs\. Leave out --p"):
        run(open_study(str(study.folder / "mine.yaml"), study.folder / "faster"), HowToRun(points=path))


def _is_read_beyond_its_length(study, cells):
    """A model trained on 64 tokens reads 128, once; the page and the picture show it."""
    config = study.config.model_copy(update={"length": LengthConfig(tokens=128, sequences=2)})
    study, said = Study("mine", config, study.folder), []
    for _ in range(2):
        length.measure(study, cells, said.append)
    (name, result), *others = length.results(study, cells).items()
    assert name == "experts, small" and not others and result.questions == 2
    assert [(row["from"], row["to"]) for row in result.rows] == [(0, 64), (64, 128)]
    assert len(read_run(cells[0].folder.root)[-1].results) == 1
    found = Evidence("mine", "y", "experts", 1, {}, (), by_length={name: result})
    found.write(study.folder / "length.json")
    again = Evidence.read(study.folder / "length.json", study)
    assert [*again.by_length[name].rows] == [*result.rows]
    check_page(page.render(study, again, page.report(study, again)))
    drawn = write_pictures(study.folder / "png", page.report(study, again).pictures)
    assert [path.name for path in drawn] == ["length.png"]


def test_length_is_refused_where_it_is_not_measured(tmp_path):
    with pytest.raises(StudyError, match="length is measured in studies with one budget for each size"):
        study_of(tmp_path, length={"tokens": 8192})


def test_points_are_listed_once_and_cost_equal_flops(tmp_path):
    study = study_of(tmp_path, variants={**STUDY["variants"], "wide": {"small": {**SMALL, "model.hidden_size": 32}}})
    cells = study.runs(study.learning_rates())
    assert len({cell.name for cell in cells}) == len(cells) == 6
    assert [cell.group for cell in cells[:2]] == ["experts", "experts"]
    by_budget = [[cell.config for cell in cells if cell.budget == budget] for budget in (2_560, 5_120)]
    for small, dense, wide in by_budget:
        assert wide.training.tokens < small.training.tokens <= dense.training.tokens
    left = afford.costs(cells, [])
    alone = afford.costs(cells[1:2], [])[0].hours
    assert left[1].hours < alone  # its trunk has been paid for by the first
    assert afford.afforded(left, left[0].hours + left[1].hours) == cells[:2]


def test_grid_changes_any_key(tmp_path):
    grid = {"optimizer.learning_rate": [1e-3, 2e-3], "model.experts": [2]}
    study = study_of(tmp_path, series=[{"sizes": ["small"], "seeds": [1], "budgets": 1, "grid": grid}])
    cells = study.runs(study.learning_rates())
    assert [cell.name for cell in cells][:2] == [
        "experts-small-seed1-learning_rate_0.001-experts_2-2560",
        "dense-small-seed1-learning_rate_0.001-experts_2-2560",
    ]
    assert {cell.config.optimizer.learning_rate for cell in cells} == {1e-3, 2e-3}
    assert {cell.trunk.model.experts for cell in cells} == {2}
    assert all(cell.config.optimizer.min_learning_rate * 20 == cell.trunk.optimizer.learning_rate for cell in cells)


def test_grid_changes_branches_alone(tmp_path):
    grid = {"branch.model.router.iterations": [0], "branch.model.router.start": ["uniform"]}
    series = [{"sizes": ["small"], "seeds": [1], "variants": ["experts"], "budgets": 1}]
    plain, changed = (study_of(tmp_path, series=[{**series[0], "grid": each}]) for each in ({}, grid))
    (plain,), (changed,) = (each.runs(each.learning_rates()) for each in (plain, changed))
    assert changed.name == "experts-small-seed1-branch_iterations_0-branch_start_uniform-2560"
    assert changed.trunk == plain.trunk and changed.chain == plain.chain
    router = changed.config.model.router
    assert (router.iterations, router.start) == (0, "uniform") != (plain.config.model.router.iterations, "uniform")
    assert changed.config.start.branch == plain.config.start.branch


def test_no_two_processes_train_one_trunk(tmp_path):
    series = [{"sizes": ["small"], "seeds": [1], "variants": each} for each in (["experts"], ["dense"])]
    study = study_of(tmp_path, series=[{**series[0], "budgets": 1}, series[1], series[0]])
    first, *dense, later = study.runs(study.learning_rates())
    local = Local(tmp_path, jobs=2, seconds=None, say=print)
    assert first.chain == later.chain and local._ready([[later], dense]) == [later]
    local.running[object()] = [first]
    assert local._ready([[later], dense]) == dense and local._ready([[later]]) is None


class StopsWhilePrinting(io.RawIOBase):
    """An output whose first write is interrupted by a request to stop."""

    def __init__(self):
        self.lines = []

    def writable(self):
        return True

    def write(self, text):
        self.lines += [bytes(text).decode()]
        if len(self.lines) == 1:
            signal.raise_signal(signal.SIGTERM)
        return len(text)


def test_a_request_to_stop_inside_a_print_saves(tmp_path):
    """A buffered output must not be entered twice, as a handler that prints would."""
    study = study_of(tmp_path)
    output = io.BufferedWriter(StopsWhilePrinting())
    say = lambda text: (output.write(f"{text}\n".encode()), output.flush())
    local = Local(tmp_path, jobs=1, seconds=None, say=say)
    sleeper = subprocess.Popen(["sleep", "600"])
    local._start = lambda chain: (local.running.update({sleeper: chain}), say("started"))
    assert local.train(study.runs(study.learning_rates())[:1]) is False
    assert sleeper.returncode == -signal.SIGTERM and not local.failed
    assert "".join(output.raw.lines) == "started\nsaving; the same command goes on from here\n"


def test_keys_that_end_alike_have_different_names(tmp_path):
    grids = [{f"model.{kind}.state_size": [8]} for kind in ("mamba2", "mamba3")]
    series = [{"sizes": ["small"], "seeds": [1], "variants": ["experts"], "budgets": 1, "grid": grid} for grid in grids]
    study = study_of(tmp_path, series=series)
    names = [cell.name for cell in study.runs(study.learning_rates())]
    assert names == [f"experts-small-seed1-model.{kind}.state_size_8-2560" for kind in ("mamba2", "mamba3")]


def grid_of(**keys):
    return {"series": [{"sizes": ["small"], "seeds": [1], "grid": keys}]}


def test_late_request_to_stop_stops_the_next_run(tmp_path, monkeypatch):
    """The run is finished and says so; the process must not begin the next one, which nobody will ask again."""
    cells = (study := study_of(tmp_path)).runs(study.learning_rates())[:2]
    paths, trained = [str(tmp_path / f"{cell.name}.yaml") for cell in cells], []
    for cell, path in zip(cells, paths, strict=True):
        Path(path).write_text(to_yaml(cell.config))

    def train(config):
        request = StopRequest()
        signal.raise_signal(signal.SIGTERM)
        request.release()
        trained.append(config.name)
        return 0

    monkeypatch.setattr(worker, "train", train)
    before = signal.getsignal(signal.SIGTERM)
    assert worker.main(paths) == STOPPED_ON_REQUEST and trained == [cells[0].name]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    "wrong, reason",
    [
        ({"tokens": {"small": [2, 1]}}, "rising order"),
        ({"series": []}, "it has none"),
        (
            {"series": [{"sizes": ["small"], "seeds": [1], "budgets": 3}]},
            r"series\.0\.budgets=3: its sizes have at most 2",
        ),
        ({"ablations": {"a": {"of": "dense", "size": "small", "set": {}}}}, "use a series with a grid"),
        (grid_of(**{"model.router.kin": [1]}), r"series\.0\.grid: .*a run has no key 'model\.router\.kin'"),
        (grid_of(**{"model.router": [1]}), r"a run has no key 'model\.router'"),
        (grid_of(**{"branch.branch.clip": [1]}), "a run has no key 'branch.clip'"),
        (grid_of(**{"model.top_k": []}), "at least 1 item"),
        (grid_of(**{"data.mixture": [[1, 2]]}), r"series\.0\.grid"),
        (grid_of(name=["x"]), "the study sets name itself"),
        (grid_of(**{"branch.training.tokens": [9]}), "the study sets training.tokens itself"),
        (grid_of(**{"branch.model.hidden_size": [8]}), "a branch goes on with its trunk's model.hidden_size"),
        (grid_of(**{"branch.training.global_batch": [8]}), "a branch goes on with its trunk's training.global_batch"),
        ({"series": [{"sizes": ["big"], "seeds": [1]}]}, "big is no size"),
        (
            {
                "tokens": {**STUDY["tokens"], "big": [1, 2]},
                "variants": {"experts": {"small": SMALL, "big": SMALL}, "dense": {"small": DENSE}},
                "series": [{"sizes": ["big"], "seeds": [1], "variants": ["dense"]}],
            },
            r"series\.0: variants\.dense has no size big",
        ),
        (
            {"tokens": {**STUDY["tokens"], "big": [1, 2]}, "variants": {"experts": {"small": SMALL}}},
            r"variants\.experts has the sizes \['small'\], and tokens has \['small', 'big'\]",
        ),
    ],
)
def test_wrong_branch_studies_are_one_line(tmp_path, wrong, reason):
    with pytest.raises(StudyError, match=rf"mine\.yaml: .*{reason}"):
        study_of(tmp_path, **wrong)


def point(variant, seed, budget, loss, size="s", rate=4e-3, **changed):
    return Point(
        variant, size, seed, budget, 1e6 * budget, budget, 0, 1000, 500, rate, loss, loss, {"code": loss},
        {"code": loss}, changed,
    )  # fmt: skip


BUDGETS = [1000 * 2**i for i in range(7)]


def test_crossing_is_where_the_sign_turns_for_good():
    """The difference is log2(tokens per parameter / 8) of seed 1, and turns at 16 for seed 2."""
    points = []
    for seed, turn in ((1, 8.0), (2, 16.0), (3, 1000.0)):
        points += [point("dense", seed, budget, 3.0) for budget in BUDGETS]
        points += [point("experts", seed, budget, 3.0 - math.log2(budget / 1000 / turn)) for budget in BUDGETS]
    two = [p for p in points if p.seed < 3]
    found = fits.crossing(two, "experts", "dense", "s")
    assert found.by_seed == pytest.approx({1: 8, 2: 16}) and found.mean == pytest.approx(math.sqrt(128))
    assert found.band[0] < found.mean < found.band[1]
    all_three = fits.crossing(points, "experts", "dense", "s")
    assert all_three.never == 1 and all_three.band is None
    (only,) = trend.compared(Evidence("x", "y", "experts", 9, {}, tuple(two)))
    assert "the sign turns at 11.3 (95% interval" in (said := trend._in_words(only)) and "in 2 of 2 seeds" in said
    unfinished = [p for p in points if p.seed < 3 or p.budget < BUDGETS[-1]]
    assert trend.compared(Evidence("x", "y", "experts", 9, {}, tuple(unfinished))) == [only]  # seed 3 may still turn


def test_crossing_may_go_the_other_way():
    """A curve that flattens earlier is ahead up to 8 tokens per parameter; a seed that differs is counted apart."""
    points = []
    for seed, sign in ((1, 1), (2, 1), (3, -1)):
        points += [point("dense", seed, budget, 3.0) for budget in BUDGETS]
        points += [point("experts", seed, budget, 3.0 + sign * math.log2(budget / 1000 / 8)) for budget in BUDGETS]
    found = fits.crossing(points, "experts", "dense", "s")
    assert found.by_seed == pytest.approx({1: 8, 2: 8}) and not found.better_after
    assert (found.never, found.always, found.band) == (0, 1, None)


def test_best_value_is_the_vertex_or_an_edge(tmp_path):
    key = "training.global_batch"
    points = [point("experts", 1, 1000, 3 + math.log2(value / 12) ** 2, **{key: value}) for value in (8, 16, 32)]
    points += [point("dense", 1, 1000, 3 - value / 1000, **{key: value}) for value in (8, 16, 32)]
    best, edge = fits.best_values(points, key)
    assert best.value == pytest.approx(12) and best.loss == pytest.approx(3) and best.twice == pytest.approx(1)
    spent = [replace(best.tried, flops=10.0**i) for i in range(3)]
    moved = [replace(best, tried=each, value=best.value * each.flops**0.2) for each in spent]
    assert fits.over_flops(moved) == pytest.approx(0.2)
    assert fits.over_flops([edge] * 3) is None
    assert edge.tried.at_edge and edge.value == 32 and edge.twice is None
    rates = [point("experts", 1, 1000, 3 + loss, rate=rate, **{RATE: rate}) for rate, loss in ((2e-3, 1), (8e-3, 2))]
    assert fits.best_values(rates[:1], RATE) == []
    (with_the_plain_one,) = fits.best_values([*rates, point("experts", 1, 1000, 3.0)], RATE)
    assert with_the_plain_one.tried.losses.keys() == {2e-3, 4e-3, 8e-3}
    text = page_of(study_of(tmp_path), Evidence("x", "y", "experts", 9, {}, (*points, point("experts", 1, 1000, 4.0))))
    check_page(text)
    assert "training.global_batch=16" in text


def test_a_change_is_compared_seed_by_seed(tmp_path):
    """The change takes 0.1, 0.2 and 0.3; the seeds themselves differ by much more."""
    points = [point("experts", seed, 1000, float(seed)) for seed in (1, 2, 3)]
    points += [point("experts", seed, 1000, 0.9 * seed, **{"model.top_k": 2}) for seed in (1, 2, 3)]
    text = page_of(study_of(tmp_path), Evidence("x", "y", "experts", 9, {}, tuple(points)))
    assert f"-0.200 ± {4.303 * 0.1 / math.sqrt(3):.3f}" in text


def test_variants_are_compared_at_their_own_best_rates(tmp_path):
    """Seed 1 has all rates and chooses: 8e-3 for experts, 2e-3 for dense. Seed 2 has only the chosen ones."""
    losses = {"experts": {2e-3: 3.3, 4e-3: 3.2, 8e-3: 3.0}, "dense": {2e-3: 3.1, 4e-3: 3.4, 8e-3: 3.5}}
    points = []
    for variant, tried in losses.items():
        for rate, loss in tried.items():
            changed = {} if rate == 4e-3 else {RATE: rate}
            seeds = (1, 2) if loss == min(tried.values()) else (1,)
            every = [(seed, budget) for seed in seeds for budget in BUDGETS]
            points += [point(variant, *at, loss + at[0], rate=rate, **changed) for at in every]
    points.append(point("dense", 2, BUDGETS[-1], 0.0, rate=8e-3, **{RATE: 8e-3}))  # not what seed 1 chose
    few = [*BUDGETS[:4], BUDGETS[-1]]  # two of the largest three are missing
    points += [point("dense", 1, budget, 0.0, rate=1.6e-2, **{RATE: 1.6e-2}) for budget in few]
    found = fits.differences(fits.at_best_rates(points), "experts", "dense", "s")
    assert [each.values for each in found] == [pytest.approx((-0.1, -0.1))] * len(BUDGETS)
    text = page_of(study_of(tmp_path), Evidence("x", "y", "experts", 9, {}, tuple(points)))
    assert "0.008 (edge)" in text and "0.002 (edge)" in text and "-0.100 ± 0.000" in text


def test_variants_without_a_size_are_left_out_there(tmp_path):
    variants = {"experts": {"small": SMALL, "big": {**SMALL, "model.hidden_size": 32}}, "dense": {"small": DENSE}}
    tokens = {**STUDY["tokens"], "big": [5_120]}
    study = study_of(tmp_path, variants=variants, tokens=tokens, series=[{"sizes": ["small", "big"], "seeds": [1]}])
    found = {(cell.group, cell.size) for cell in study.runs(study.learning_rates())}
    assert found == {("experts", "small"), ("experts", "big"), ("dense", "small")}


def test_older_study_files_are_read(tmp_path):
    old = {key: value for key, value in STUDY.items() if key != "corpus"}
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(old | {"vocabulary": 300, "corpus_megabytes": 7}))
    corpus = read_study(str(tmp_path / "old.yaml")).corpus
    assert (corpus.vocabulary, corpus.megabytes, corpus.near_duplicates) == (300, 7, False)


@pytest.mark.parametrize(
    "content, why",
    [
        ("", "Expecting value"),
        ("[1]", "its content: "),
        ("{}", "name: Field required"),
        ('{"name": "x"', "Expecting ',' delimiter"),
        ("\udcff", "can't decode byte"),
    ],
)
def test_unreadable_points_are_one_line(tmp_path, content, why):
    path = tmp_path / "points.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(StudyError, match=rf"points\.json cannot be read as the points of a study: .*{why}"):
        run(study_of(tmp_path), HowToRun(points=path))  # before any text is gathered


def test_points_of_another_study_are_not_drawn(tmp_path):
    how = HowToRun(points=ROOT / "docs" / "studies" / "trend.json", page_only=True)
    with pytest.raises(StudyError, match="points of the study trend"):
        run(study_of(tmp_path), how)


def test_page_before_a_learning_rate_is_chosen(tmp_path, capsys):
    tuning = {"size": "small", "learning_rates": [4e-3, 8e-3]}
    assert not run(study_of(tmp_path, tuning=tuning), HowToRun(page_only=True))
    assert capsys.readouterr().out.startswith("0 of 0 planned points are finished")


def test_page_is_made_from_the_committed_points(tmp_path, capsys):
    how = HowToRun(points=ROOT / "docs" / "studies" / "trend.json", page_only=True, png=tmp_path / "png")
    assert run(open_study("trend", tmp_path), how)
    assert "planned points are finished" in capsys.readouterr().out
    check_page((tmp_path / "study.html").read_text())
    assert (tmp_path / "png" / "trend.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "points.json").exists()


@pytest.mark.parametrize("output", [False, True])
def test_package_without_the_analysis_says_where_it_is(output, tmp_path, monkeypatch, capsys):
    """The output of a study may lie where Python looks for the analysis: a folder of the same name."""
    monkeypatch.setattr(commands, "ANALYSIS", "nowhere.trend")
    if output:
        (tmp_path / "nowhere" / "trend").mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path)
    how = HowToRun(points=ROOT / "docs" / "studies" / "confirm.json", page_only=True, tables=True, png=tmp_path)
    study = open_study("confirm", tmp_path)
    assert run(study, how)
    said = capsys.readouterr()
    assert "the analysis of such studies is in the folder studies/ of the repository" in said.err
    assert "| softmax | xs |" in said.out and "### Turns" not in said.out
    text = (tmp_path / "study.html").read_text()
    check_page(text)
    known = Evidence.read(how.points, study)
    assert known.planned == study.planned  # the file follows the study, which may grow
    assert f"{len(known.points)} of {known.planned} runs are finished" in text and "softmax, s</title>" in text
    assert (tmp_path / "loss.png").is_file()


def test_analysis_without_scipy_names_its_extra(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "studies"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "scipy", None)
    how = HowToRun(points=ROOT / "docs" / "studies" / "confirm.json", page_only=True)
    with pytest.raises(StudyError, match=r"needs scipy: pip install -e '\.\[studies\]'"):
        run(open_study("confirm", tmp_path), how)
