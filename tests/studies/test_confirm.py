"""The study `confirm`: its analysis is right on simulated losses, and its runs follow the declared rules."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_blackmamba.study import afford, commands, page
from megatron_blackmamba.study.config import RATE, PrimaryConfig, StudyError, read_study
from megatron_blackmamba.study.execute import Local
from megatron_blackmamba.study.grids import best_rates
from megatron_blackmamba.study.options import HowToRun
from megatron_blackmamba.study.points import Evidence
from megatron_blackmamba.study.runs import Study
from studies import differences, fits
from studies.trend import decisions
from tests.study.test_trunks import point, study_of

BUDGET = 1000
LOCAL = Local(Path("configs"), jobs=1, seconds=None, say=print)
DECLARED = PrimaryConfig(one="experts", other="dense", size="s", budget=BUDGET, seeds=[4, 5, 6, 7, 8, 9, 10])


def simulated(draw, mean, seeds=DECLARED.seeds, common=0.02, rests=(0.016, 0.006)):
    """Return points whose seeds share a part, and whose variants have rests of unequal size."""
    shared = {seed: draw.normal(0, common) for seed in seeds}
    losses = {"experts": 3 + mean, "dense": 3.0}
    return [
        point(variant, seed, BUDGET, loss + shared[seed] + draw.normal(0, rest))
        for (variant, loss), rest in zip(losses.items(), rests, strict=True)
        for seed in seeds
    ]


@pytest.mark.parametrize("common", [0.0, 0.05])
def test_intervals_hold_whatever_seeds_share(common):
    """Of 2,000 simulated studies without a difference, 5% find one: within three standard errors of a count."""
    draw = np.random.default_rng(1)
    verdicts = [differences.decide(simulated(draw, 0.0, common=common), DECLARED).verdict for _ in range(2000)]
    assert sum("lower loss" in verdict for verdict in verdicts) == pytest.approx(100, abs=29)


def test_a_real_difference_is_found_with_its_sign():
    draw = np.random.default_rng(2)
    verdicts = {sign: differences.decide(simulated(draw, sign * 0.05), DECLARED).verdict for sign in (-1, 1)}
    assert verdicts == {-1: "experts has the lower loss", 1: "dense has the lower loss"}


def test_variances_of_the_model_are_recovered():
    draw = np.random.default_rng(3)
    found = np.mean([differences.decide(simulated(draw, 0.1), DECLARED).variances for _ in range(2000)], axis=0)
    assert found == pytest.approx([0.02**2, 0.016**2, 0.006**2], abs=1.2e-5)


def test_nothing_is_said_before_all_seeds_are_there():
    points = simulated(np.random.default_rng(4), -1.0)
    explored = simulated(np.random.default_rng(5), 1.0, seeds=[1, 2, 3])  # they may not count
    some = Evidence("x", "y", "experts", 9, {}, (*points[1:], *explored))
    (line,) = decisions(some, [DECLARED])
    assert line.endswith("6 of 7 seeds are finished: no conclusion before all seeds are finished.")
    whole, numbers = decisions(Evidence("x", "y", "experts", 9, {}, (*points, *explored)), [DECLARED])
    assert whole.endswith("7 of 7 seeds are finished: experts has the lower loss.") and "difference is -0.99" in numbers


def test_losses_of_waiting_comparisons_are_sealed(tmp_path, capsys):
    """Neither the summary nor a table or the page shows them, until the last seed is there."""
    draw = np.random.default_rng(6)
    fresh, explored = simulated(draw, -2.0), simulated(draw, 0.5, seeds=[1, 2, 3])
    file = study_of(tmp_path).config.model_copy(update={"primary": [DECLARED]})
    study, how = Study("mine", file, tmp_path), HowToRun(tables=True)
    for count in (len(fresh) - 1, len(fresh)):
        found = Evidence("mine", "y", "experts", 20, {}, (*explored, *fresh[:count]))
        page = commands.draw(found, study, how).read_text()
        said = capsys.readouterr().out
        whole = count == len(fresh)
        assert said.startswith(f"{count + 6} of 20 planned points are finished")
        assert [text.count("(3 seeds)") > 0 for text in (said, page)] == [not whole] * 2
        assert ("The difference is -2." in said) == whole
        assert said.index("Declared: ") < said.index("experts − dense, size")
    lost = [replace(p, loss=math.nan) if p.seed == 4 else p for p in fresh]
    assert differences.decide(lost, DECLARED).verdict == "open, the loss of a run is not finite"


def test_plain_page_seals_waiting_comparisons_too(tmp_path):
    """Without the analysis, the table of results has the explored seeds alone until the last fresh one is there."""
    draw = np.random.default_rng(7)
    fresh, explored = simulated(draw, -2.0), simulated(draw, 0.5, seeds=[1, 2, 3])
    study = Study("mine", study_of(tmp_path).config.model_copy(update={"primary": [DECLARED]}), tmp_path)
    for count in (len(fresh) - 1, len(fresh)):
        report = page.report(study, Evidence("mine", "y", "experts", 20, {}, (*explored, *fresh[:count])))
        (results,) = (part for part in report.parts if getattr(part, "title", "") == "Results")
        losses = {row[0]: float(row[results.columns.index("validation loss")].split()[0]) for row in results.rows}
        assert (losses["experts"] > 3) == (count < len(fresh))


def grids(folder, **last):
    series = [
        {"sizes": ["small"], "seeds": [1, 2], "variants": ["experts"], "grid": {RATE: [8e-3, 1.6e-2]}},
        {"sizes": ["small"], "seeds": [1, 2], "variants": ["experts"]},
        {"sizes": ["small"], "seeds": [4], "variants": ["experts"], "best_rate": True, **last},
    ]
    return study_of(folder, series=series)


def tuned(study, losses):
    """Return the points of the grid with given losses by rate."""
    cells = [cell for cell in study.runs(study.learning_rates()) if not cell.waits]
    cells = [cell for cell in cells if cell.group == "experts"]
    rates = [cell.config.optimizer.learning_rate for cell in cells]
    changed = [dict(cell.changed) for cell in cells]
    at = [
        point("experts", cell.seed, cell.budget, losses[rate], size="small", rate=rate, **keys)
        for cell, rate, keys in zip(cells, rates, changed, strict=True)
    ]
    spent = [cell.step_flops * cell.config.steps for cell in cells]
    return [replace(p, flops=float(flops)) for p, flops in zip(at, spent, strict=True)]


def test_fresh_seeds_wait_for_a_bracketed_rate(tmp_path, capsys):
    study = grids(tmp_path)
    inside, edge = {4e-3: 3.2, 8e-3: 3.0, 1.6e-2: 3.1}, {4e-3: 3.2, 8e-3: 3.1, 1.6e-2: 3.0}

    def fresh(points):
        known = Evidence("mine", "y", "experts", 9, {}, tuple(points))
        settled = commands.settled(study, known)
        return [c for c in settled.runs(settled.learning_rates()) if c.seed == 4]

    assert [cell.waits for cell in fresh(tuned(study, inside)[1:])] == [True, True]  # one point is missing
    assert [cell.waits for cell in fresh(tuned(study, edge))] == [True, True]
    assert "experts, small: the best rate 0.016 is at an edge" in capsys.readouterr().err
    cells = fresh(tuned(study, inside))
    assert [(c.waits, c.config.optimizer.learning_rate, c.trunk.optimizer.learning_rate) for c in cells] == [
        (False, 8e-3, 8e-3)
    ] * 2
    known = Evidence("mine", "y", "experts", 9, {}, tuple(tuned(study, inside)))
    seeds = [point("experts", 4, c.budget, 2.0, size="small", rate=8e-3, **dict(c.changed)) for c in cells]
    assert commands.settled(study, Evidence("mine", "y", "experts", 9, {}, (*known.points, *seeds))).best == {
        ("experts", "small"): 8e-3
    }


def test_series_after_fresh_seeds_come_after_them(tmp_path, monkeypatch):
    """The grid of another variant stands behind the fresh seeds, and waits until their rate is chosen."""
    dense = {"sizes": ["small"], "seeds": [1], "variants": ["dense"]}
    series = [*grids(tmp_path).config.model_dump()["series"], dense]
    study = study_of(tmp_path, series=series)
    points = tuned(study, {4e-3: 3.2, 8e-3: 3.0, 1.6e-2: 3.1})
    asked = []

    def asks(cells, *_):
        asked.append([(cell.group, cell.seed) for cell in cells])
        return not cells

    monkeypatch.setattr(commands, "_do", asks)
    for some in (points[1:], points):
        known = Evidence("mine", "y", "experts", 9, {}, tuple(some))
        assert not commands._train(commands.settled(study, known), HowToRun(), known, LOCAL)
    first, second = (each for each in asked if each)
    assert first == [("experts", 1)] and second == [("experts", 4)] * 2 + [("dense", 1)] * 2


def test_a_budget_pays_for_no_waiting_point(tmp_path, monkeypatch, capsys):
    grid, plain, fresh = grids(tmp_path).config.model_dump()["series"]
    study = study_of(tmp_path, series=[fresh, grid, plain])
    asked = []
    monkeypatch.setattr(commands, "_do", lambda cells, *_: asked.append([cell.seed for cell in cells]) or not cells)
    first = [cell for cell in study.cells() if not cell.waits][:2]
    hours = sum(each.hours for each in afford.costs(first, ())) * 1.001
    commands._train(study, HowToRun(budget=hours), None, LOCAL)
    assert [seeds for seeds in asked if seeds] == [[1, 1]]
    assert "2 of 12 points" in capsys.readouterr().err


def test_a_rate_is_judged_by_diverged_seeds_too():
    def tried(*losses):
        rates = {4e-3: 3.2, 8e-3: 3.0}
        points = [point("experts", seed, 1000, loss, rate=rate) for rate, loss in rates.items() for seed in (1, 2)]
        points += [point("experts", seed, 1000, loss, rate=1.6e-2) for seed, loss in enumerate(losses, 1)]
        (best,) = best_rates(points).values()
        (value,) = fits.best_values(points, RATE)
        assert (value.value, value.twice) == (best.lowest, None)
        assert {p.rate for p in fits.at_best_rates(points)} == {best.lowest}
        return best.lowest, best.at_edge

    assert tried(2.9, math.nan) == tried(math.nan, math.nan) == (8e-3, False)


def test_a_diverged_run_is_in_no_difference():
    points = [point(name, seed, n, 3.0) for name in ("a", "b") for seed in (1, 2) for n in (1000, 2000)]
    points[-1] = replace(points[-1], loss=math.nan)
    points += [replace(p, rate=8e-3, loss=9.0) for p in points if p.seed == 1]
    found = fits.differences(fits.at_best_rates(points), "a", "b", "s")
    assert [each.values for each in found] == [(0.0, 0.0), (0.0,)]


@pytest.mark.parametrize("more", [{"grid": {"model.router.temperature": [1.0]}}, {"grid": {RATE: [8e-3, 1e-2]}}])
def test_a_declared_seed_has_one_point(tmp_path, more):
    declared = {"one": "experts", "other": "dense", "size": "small", "budget": 5_120, "seeds": [1, 2]}
    series = [{"sizes": ["small"], "seeds": [1, 2]}]
    study_of(tmp_path, series=[*series, *series], primary=[declared])
    with pytest.raises(StudyError, match=r"primary.0: the series train experts with seed 2 in several ways"):
        study_of(tmp_path, series=[*series, {"sizes": ["small"], "seeds": [2], **more}], primary=[declared])


def test_the_declared_study_is_a_part_of_trend():
    """Its points of seeds 1 to 3 are those of `trend`, which it counts as finished."""
    trend, confirm = read_study("trend"), read_study("confirm")
    assert (confirm.set, confirm.corpus, confirm.base) == (trend.set, trend.corpus, trend.base)
    for variant in ("softmax", "mamba", "sinkhorn_bias", "quantile"):
        assert confirm.variants[variant].items() <= trend.variants[variant].items()
    assert confirm.variants["mamba_total"]["xs"].items() >= trend.variants["mamba"]["s"].items()
    assert [(p.one, p.other, p.size, p.budget, p.seeds) for p in confirm.primary] == [
        ("softmax", other, "xs", 16_000_000, [4, 5, 6, 7, 8, 9, 10]) for other in ("mamba", "mamba_total")
    ]
    fresh = [series for series in confirm.series if series.best_rate]
    assert fresh and all(min(series.seeds) > 3 for series in fresh)
    assert all(series.seeds == [1, 2, 3] for series in confirm.series if not series.best_rate)


@pytest.mark.parametrize(
    "wrong, reason",
    [
        ({"primary": [{**DECLARED.model_dump(), "size": "small"}]}, r"primary\.0: no such variant, size or budget"),
        (
            {"series": [{"sizes": ["small"], "seeds": [1], "best_rate": True, "grid": {RATE: [1e-3]}}]},
            r"series\.0: best_rate chooses optimizer\.learning_rate",
        ),
    ],
)
def test_wrong_declarations_are_one_line(tmp_path, wrong, reason):
    with pytest.raises(StudyError, match=reason):
        study_of(tmp_path, **wrong)
