"""Conclusions from differences: tests allow for their number, and nothing is extrapolated."""

import math
from dataclasses import replace

import numpy as np
import pytest

from megatron_blackmamba.report.pictures import write_pictures
from megatron_blackmamba.study.config import RATE
from megatron_blackmamba.study.points import Evidence, Point
from studies import differences, fits, picture, tables, trend
from studies.routing import MEANING
from tests.pages import check_page
from tests.study.test_trunks import page_of, study_of

SIZES = {"xs": 1_000, "s": 8_000}
RATIOS = (3, 6, 12, 24, 48)


def point(variant, size, seed, ratio, loss, **fields):
    tokens, parameters = ratio * SIZES[size], fields.pop("parameters", SIZES[size])
    active = fields.pop("active", parameters)
    known = {"training": loss, "validation": {"code": loss}, "bits_per_byte": {"code": loss}, "rate": 4e-3}
    return Point(
        variant,
        size,
        seed,
        tokens,
        6.0 * tokens * SIZES[size],
        tokens,
        0,
        parameters,
        active,
        loss=loss,
        **known,
        **fields,
    )


def law(ratio, parameters, seed):
    return 0.3 - 0.1 * math.log(ratio) + 0.02 * math.log(parameters / 1000) + 0.01 * seed


@pytest.fixture
def points():
    """Dense models, and experts that are better from some tokens per parameter on."""
    found = []
    for size, seed, ratio in ((size, seed, ratio) for size in SIZES for seed in (1, 2, 3) for ratio in RATIOS):
        dense = 10 * (ratio * SIZES[size]) ** -0.1
        found.append(point("experts", size, seed, ratio, dense + law(ratio, SIZES[size], seed), active=500))
        found.append(point("dense", size, seed, ratio, dense, parameters=500))
        found.append(point("other", size, seed, ratio, dense + law(ratio, SIZES[size], seed) - 0.02, active=500))
    return found


def test_p_values_are_those_of_students_t():
    """Against closed forms: with two degrees of freedom, and tables."""
    values = [0.1, 0.2, 0.4]
    t = np.mean(values) / np.std(values, ddof=1) * math.sqrt(3)
    assert differences.p_value(values) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-9)
    assert differences.p_value([-value for value in values]) == pytest.approx(differences.p_value(values), rel=1e-12)
    assert differences.p_value([12.706 + 1, 12.706 - 1]) == pytest.approx(0.05, abs=1e-4)
    assert differences.p_value([0.0, 0.0]) == 1 and differences.p_value([1.0, 1.0]) == 0


def test_many_tests_need_smaller_p_values():
    assert differences.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert differences.holm([0.9, 0.6]) == [1.0, 1.0]


def test_only_large_budgets_and_three_seeds_are_tested(points):
    pairs = [("experts", other, size) for other in ("dense", "other") for size in SIZES]
    test, *others = differences.comparisons(points, pairs)
    large = [law(ratio, 1000, 2) for ratio in RATIOS if ratio >= 10]
    assert (test.other, test.size) == ("dense", "xs") and test.by_seed[2] == pytest.approx(np.mean(large))
    assert [other.adjusted >= other.p for other in others] == [True] * 3
    assert differences.comparisons([p for p in points if p.seed < 3], pairs) == []


def next_size(ratio):
    """Return a loss that a parabola over the logarithm of FLOPs describes, as the curves of models nearly are."""
    return 5 - 0.5 * math.log(ratio) + 0.03 * math.log(ratio) ** 2


def test_larger_dense_models_are_interpolated_at_equal_flops(points):
    """The dense model of size s has as many parameters as the one with experts of size xs, and other budgets."""
    dense = [
        replace(p, parameters=1_000, active=1_000, flops=p.flops / 20, loss=next_size(p.flops / 2e9) + p.seed)
        for p in points
        if (p.variant, p.size) == ("dense", "s")
    ]
    some = [p for p in points if (p.variant, p.size) != ("dense", "s")] + dense
    added = fits.with_next_size(some)[len(some) :]
    low = min(p.flops for p in dense)
    ours = {(p.seed, p.budget): p for p in points if (p.variant, p.size) == ("experts", "xs")}
    assert {(p.seed, p.budget) for p in added} == {key for key, p in ours.items() if p.flops >= low} != set()
    for p in added:
        assert (p.variant, p.size, p.flops) == ("dense, next size", "xs", ours[p.seed, p.budget].flops)
        assert p.loss == pytest.approx(next_size(p.flops / 1e8) + p.seed, abs=1e-6)
        assert p.tokens == pytest.approx(p.flops / (6.0 * 8_000 / 20), abs=1)
    larger = [replace(p, parameters=1_200, active=1_200) if p in dense else p for p in some]
    assert fits.with_next_size(larger) == larger  # a fifth more parameters is not as many


def test_equal_losses_are_interpolated_and_never_extrapolated(points):
    """The dense curve is a power law, so the FLOPs for a loss are known."""
    found = differences.equal_losses(points, "experts", "dense", "xs")
    assert [equal.difference.per_parameter for equal in found] == [6.0, 12.0, 24.0]  # not at 3, 48
    assert [sorted(equal.bounds) for equal in found] == [[], [], []]
    loss = 10 * 24_000**-0.1 + law(24, 1000, 1)
    assert found[-1].by_seed[1] == pytest.approx((10 / loss) ** 10 / 24_000, rel=0.02)


def test_curve_that_ends_above_loss_gives_a_bound(points):
    """Without it, the seed that the other variant does worst in would be left out of the mean."""
    shorter = [p for p in points if (p.variant, p.seed) != ("dense", 3) or p.tokens < 24_000]
    shorter = [replace(p, loss=p.loss + 1) if (p.variant, p.seed) == ("dense", 3) else p for p in shorter]
    found = differences.equal_losses(shorter, "experts", "dense", "xs")[0]
    assert found.bounds == {3} and found.by_seed[3] == pytest.approx(12 / found.difference.per_parameter)
    assert f"3: &gt; {found.by_seed[3]:.2f}" in tables.equal_losses(shorter, ["experts"]).html()


def test_picture_has_experts_and_dense_models(points, tmp_path):
    def drawn(names, *variants):
        some = tuple(p for p in points if p.variant in variants)
        return picture.charts(Evidence("x", "y", "experts", 90, {}, some), names)

    dense_like = [replace(p, flops=1.01 * p.flops) if p.variant == "dense" else p for p in points]
    assert picture._shown(Evidence("x", "y", "experts", 90, {}, tuple(dense_like))) == ["experts", "dense"]
    losses, changes = drawn({"experts": "a", "other": "b", "dense": "c"}, "experts", "dense", "other")
    assert [line.name.partition(":")[0] for line in losses.curves] == ["a", "b", "c", "c"]  # dense ones of both sizes
    assert [line.name for line in changes.curves] == [
        *("a, less c, size xs", "a, less c, size s", "b, less c, size xs", "b, less c, size s"),
        "experts are worse above, better below",
    ]
    assert changes.curves[0].y == pytest.approx([law(ratio, 1000, 2) for ratio in RATIOS])
    assert [line.band is not None for line in changes.curves] == [True, True, False, False, False]
    (path,) = write_pictures(tmp_path, {"x": [losses, changes]})
    assert path.name == "x.png" and path.read_bytes().startswith(b"\x89PNG")
    assert drawn({}, "experts", "other") == drawn({}, "experts") == drawn({}) == []


def test_page_shows_why(points, tmp_path):
    seen = dict.fromkeys(MEANING, 0.5)
    points[0] = point("experts", "xs", 1, 3, 4.0, active=500, router=seen)
    generation = [{"group": "dense", "size": "xs", "lengths": [16, 2048], "milliseconds": [1, 2], "bytes": [8, 8]}]
    found = Evidence("x", "y", "experts", 90, {}, tuple(points), generation)
    text = page_of(study_of(tmp_path), found)
    check_page(text)
    for title in ("Turns", "Tests", "Equal losses", "Routers", "Generation"):
        assert f"<h2>{title}</h2>" in text
    higher = [replace(p, rate=8e-3, changed={RATE: 8e-3}, loss=p.loss - 0.1 * (p.variant == "dense")) for p in points]
    both = replace(found, points=(*points, *higher))
    assert "<h2>Tests, each at its best learning rate</h2>" in page_of(study_of(tmp_path), both)
    said = [each.where for each in trend.compared(both) if (each.other, each.size) == ("dense", "xs")]
    assert said == [tables.TUNED]
    assert tables.routers([]).html() == ""


def test_tables_are_markdown_with_minus_signs(points):
    found = Evidence("x", "y", "experts", 90, {}, tuple(points))
    text = tables.compared(found.plain, "experts").markdown()
    title, header = text.splitlines()[0], text.splitlines()[4]
    assert title == "### Differences of experts"
    assert header == "| size | budget | FLOPs | tokens per parameter | seeds | experts | − dense | − other |"
    row = next(line for line in text.splitlines() if line.startswith("| s | 384k |"))
    mean, half = law(48, 8_000, 2), 0.01 * 4.303 / math.sqrt(3)
    assert f"| −{-mean:.3f} ± {half:.3f} | +0.020 ± 0.000 |" in row and "| -0" not in text


def test_rules_of_inference_are_compared_on_same_weights(points):
    seen = [{"loss": 3.0 + seed, "balanced": 3.1 + seed, "plain": 3.05 + seed + 0.01 * seed} for seed in (1, 2, 3)]
    looked = ("experts", "xs", 3000)
    better = [replace(p, rate=0.008, changed={RATE: 0.008}, loss=p.loss - 0.1) for p in points]
    fresh = [replace(p, router=seen[p.seed - 1] if (p.variant, p.size, p.budget) == looked else {}) for p in better]
    (row,) = tables.rules(fresh).rows
    assert row == ["experts", "xs", "3k", "3", "+0.070 ± 0.025", "-0.030 ± 0.025", "stays"]
    found = tables.every(Evidence("x", "y", "experts", 90, {}, (*points, *fresh)), ["experts"], {})
    (table,) = (each for each in found if each.title.startswith("Rules"))
    assert table.rows == [row] and table.title.endswith(tables.TUNED)  # seeds at the best rate, not at the study's own


@pytest.mark.parametrize(
    "gains, said",
    [([0.02, 0.021, 0.022], "stays"), ([0.001, 0.002, 0.003], "vanishes"), ([0.0, 0.01, 0.02], "open"), ([1], "open")],
)
def test_a_gain_stays_or_vanishes_beyond_its_interval(gains, said):
    assert tables._stays(gains) == said


def test_generation_shows_the_loss_of_the_largest_budget(points):
    measured = {"group": "dense", "size": "s", "lengths": [16, 64], "milliseconds": [1.0, 2.0], "bytes": [8, 8]}
    text = tables.generation(Evidence("x", "y", "experts", 90, {}, tuple(points), [measured])).html()
    losses = {p.budget: p.loss for p in points if (p.variant, p.size) == ("dense", "s")}
    assert f"{losses[max(losses)]:.3f}" in text and f"{losses[min(losses)]:.3f}" not in text


def test_intervals_of_turns_end_where_points_do():
    """Two seeds that turn at 4 and 16 have an interval from 1.2e-6 to 5e7."""
    cross = fits.Crossing({1: 4.0, 2: 16.0}, True, never=0, always=0, measured=(2.0, 75.0))
    assert cross.interval == "below 2.0 to beyond 75.0"
    near = fits.Crossing({1: 8.0, 2: 8.1}, True, never=0, always=0, measured=(2.0, 75.0))
    assert near.interval == f"{near.band[0]:.1f} to {near.band[1]:.1f}"


def test_crossings_count_all_seeds():
    said = trend._crossing(fits.Crossing({1: 10.0}, True, never=2, always=1))
    assert said == (
        "the sign turns at 10.0 in 1 of 4 seeds, positive at the end in 2 of 4 seeds,"
        " negative at the end in 1 of 4 seeds"
    )
