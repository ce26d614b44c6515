"""Conclusions from differences: tests allow for their number, and laws are found where they are."""

import math
from dataclasses import replace

import numpy as np
import pytest

from megatron_blackmamba.study import differences, evidence, evidence_picture, evidence_why, fits
from megatron_blackmamba.study.points import Evidence, Point
from megatron_blackmamba.study.routing import MEANING
from tests.pages import check_page

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
    assert differences.p_value(values) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-6)
    assert differences.p_value([-value for value in values]) == differences.p_value(values)
    assert differences.p_value([12.706 + 1, 12.706 - 1]) == pytest.approx(0.05, abs=1e-4)
    assert differences.p_value([0.0, 0.0]) == 1 and differences.p_value([1.0, 1.0]) == 0


def test_many_tests_need_smaller_p_values():
    assert differences.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert differences.holm([0.9, 0.6]) == [1.0, 1.0]


def test_only_large_budgets_and_three_seeds_are_tested(points):
    test, *others = differences.comparisons(points, "experts")
    large = [law(ratio, 1000, 2) for ratio in RATIOS if ratio >= 10]
    assert (test.other, test.size) == ("dense", "xs") and test.mean == pytest.approx(np.mean(large))
    assert [other.adjusted >= other.p for other in others] == [True] * 3
    assert differences.comparisons([p for p in points if p.seed < 3], "experts") == []


def test_law_of_the_difference_is_found_and_extrapolated(points):
    found = differences.difference_law(points, "experts", "dense")
    assert found.residual < 1e-9 and found.largest == (8_000, 48)
    mean, half = found.at(1e9, 100)
    assert mean == pytest.approx(law(100, 1e9, 2)) and half == pytest.approx(0.01 * 4.303 / math.sqrt(3), rel=1e-3)
    turn, _ = found.crossing(8_000)
    assert law(math.exp(turn), 8_000, 2) == pytest.approx(0, abs=1e-9)
    assert differences.difference_law([p for p in points if p.size == "s"], "experts", "dense") is None


def test_equal_losses_are_interpolated_and_never_extrapolated(points):
    """The dense curve is a power law, so the FLOPs for a loss are known."""
    found = differences.equal_losses(points, "experts", "dense", "xs")
    assert [equal.difference.per_parameter for equal in found] == [6.0, 12.0, 24.0]  # not at 3, 48
    assert [sorted(equal.bounds) for equal in found] == [[], [], []]
    loss = 10 * 24_000**-0.1 + law(24, 1000, 1)
    assert found[-1].by_seed[1] == pytest.approx((10 / loss) ** 10 / 24_000, rel=0.02)


def test_a_curve_that_ends_above_the_loss_gives_a_bound(points):
    """Without it, the seed that the other variant does worst in would be left out of the mean."""
    shorter = [p for p in points if (p.variant, p.seed) != ("dense", 3) or p.tokens < 24_000]
    shorter = [replace(p, loss=p.loss + 1) if (p.variant, p.seed) == ("dense", 3) else p for p in shorter]
    found = differences.equal_losses(shorter, "experts", "dense", "xs")[0]
    assert found.bounds == {3} and found.by_seed[3] == pytest.approx(12 / found.difference.per_parameter)
    assert f"3: &gt; {found.by_seed[3]:.2f}" in evidence_why.equal_losses(shorter, "experts")


def test_picture_has_models_without_experts_and_other_routers(points, tmp_path):
    assert evidence_picture.kinds_of_others(points, "experts") == (["dense"], ["other"])
    found = Evidence("x", "y", "experts", 90, {}, tuple(points))
    path = evidence_picture.write_picture(found, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_picture_leaves_out_what_has_no_points(points, tmp_path):
    def drawn(*variants):
        some = tuple(p for p in points if p.variant in variants)
        return evidence_picture.write_picture(Evidence("x", "y", "experts", 90, {}, some), tmp_path)

    both, width = drawn("experts", "dense", "other"), 16
    sizes = {both.read_bytes()[width : width + 4], drawn("experts", "dense").read_bytes()[width : width + 4]}
    assert len(sizes) == 2  # one side is narrower than two
    assert drawn("experts") is None and drawn() is None


def test_page_shows_why(points):
    seen = dict.fromkeys(MEANING, 0.5)
    points[0] = point("experts", "xs", 1, 3, 4.0, active=500, router=seen)
    generation = [{"group": "dense", "size": "xs", "lengths": [16, 2048], "milliseconds": [1, 2], "bytes": [8, 8]}]
    found = Evidence("x", "y", "experts", 90, {}, tuple(points), generation)
    page = evidence.render(found)
    check_page(page)
    for title in ("Tests", "Equal losses", "Law of the difference", "Routers", "Generation"):
        assert f"<h2>{title}</h2>" in page
    assert any("extrapolated to 2.8B parameters" in line for line in evidence.summary(found))
    higher = [
        replace(p, rate=8e-3, changed={fits.RATE: 8e-3}, loss=p.loss - 0.1 * (p.variant == "dense")) for p in points
    ]
    both = replace(found, points=(*points, *higher))
    said = [line for line in evidence.summary(both) if line.startswith("experts − dense") and "the law" in line]
    tuned, law = (line.partition(":")[0] for line in said)
    assert (tuned, law) == ("experts − dense, each at its best learning rate", "experts − dense")
    assert "<h2>Law of the difference, each at its best learning rate</h2>" in evidence.render(both)
    assert evidence_why.routers([]) == ""


def test_generation_shows_the_loss_of_the_largest_budget(points):
    measured = {"group": "dense", "size": "s", "lengths": [16, 64], "milliseconds": [1.0, 2.0], "bytes": [8, 8]}
    page = evidence_why.generation(Evidence("x", "y", "experts", 90, {}, tuple(points), [measured]))
    losses = {p.budget: p.loss for p in points if (p.variant, p.size) == ("dense", "s")}
    assert f"{losses[max(losses)]:.3f}" in page and f"{losses[min(losses)]:.3f}" not in page


def test_crossings_count_all_seeds():
    said = evidence._crossing(fits.Crossing("s", 8_000, {1: 10.0}, never=2, always=1))
    assert said == (
        "the sign turns at 10.0 in 1 of 4 seeds, still positive in 2 of 4 seeds,"
        " negative at every budget in 1 of 4 seeds"
    )
