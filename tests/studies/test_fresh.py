"""Tables over fresh seeds: seeds that chose a rate count nowhere, and parts of a router are told apart."""

import math
from dataclasses import replace

import numpy as np
import pytest

from megatron_blackmamba.study.config import RATE, StudyError, read_study
from megatron_blackmamba.study.points import Evidence
from studies import fresh, tables, trend
from tests.studies.test_differences import point
from tests.study.test_trunks import study_of

GATE, CHOICE = 0.02, 0.005
MEANS = {"softmax": 0.0, "crossed": GATE, "sinkhorn": GATE + CHOICE, "sinkhorn_crossed": CHOICE}
PARTS = {
    "gate": [("crossed", "softmax"), ("sinkhorn", "sinkhorn_crossed")],
    "choice": [("sinkhorn", "crossed"), ("sinkhorn_crossed", "softmax")],
}
FRESH = range(4, 14)


def simulated(seeds=FRESH, common=0.05, rest=0.002):
    """Return points of crossed routers, whose seeds share a part, and of the seeds that chose the rates."""
    draw, found = np.random.default_rng(1), []
    for seed in (1, 2, 3, *seeds):
        shared = draw.normal(0, common)
        for variant, mean in MEANS.items():
            chose = seed < 4
            for rate in (4e-3, 8e-3, 16e-3) if chose else (8e-3,):
                loss = 3 + mean + shared + draw.normal(0, rest) - 5 * chose + abs(rate - 8e-3)
                found.append(replace(point(variant, "xs", seed, 3, loss, active=500), rate=rate, changed={RATE: rate}))
    return found


def test_parts_of_crossed_routers_are_told_apart():
    rows = fresh.parts(fresh.at_fresh_seeds(simulated()), PARTS).rows
    assert [row[:4] for row in rows] == [["gate", "xs", "3k", "10"], ["choice", "xs", "3k", "10"]]
    for row, true in zip(rows, (GATE, CHOICE), strict=True):
        mean, half = (float(value) for value in row[-1].split(" ± "))
        assert abs(mean - true) <= half < 0.003  # a seed's part, 0.05, is in none of them


def test_seeds_that_chose_rates_count_nowhere():
    """Their losses are 5 nats lower here."""
    points = simulated()
    assert {p.seed for p in fresh.at_fresh_seeds(points)} == set(FRESH)
    other = [p for p in points if not (p.variant == "softmax" and p.seed < 4 and p.rate != 8e-3)]
    assert {p.seed for p in fresh.at_fresh_seeds(other)} == set(FRESH)  # softmax at one rate: they chose for others


def test_routers_are_ranked_by_seeds_that_all_have():
    rows = fresh.ranked(fresh.at_fresh_seeds(simulated())).rows
    assert [row[3] for row in rows] == ["softmax", "sinkhorn_crossed", "crossed", "sinkhorn"]
    assert [row[-1] for row in rows] == ["lowest", "worse", "worse", "worse"]
    noisy = fresh.ranked(fresh.at_fresh_seeds(simulated(rest=0.1))).rows
    assert {row[-1] for row in noisy} == {"lowest", "open"}


def test_a_router_that_lacks_a_seed_waits():
    """Also if its run with that seed diverged: the others would be its lucky ones."""
    points = [replace(p, loss=math.inf) if (p.variant, p.seed) == ("softmax", 9) else p for p in simulated(rest=0.0005)]
    found = fresh.at_fresh_seeds(points)
    said = {row[3]: (row[2], row[-1]) for row in fresh.ranked(found).rows}
    assert said.pop("softmax") == ("9", "waits for seeds")
    assert said == {"sinkhorn_crossed": ("10", "lowest"), "crossed": ("10", "worse"), "sinkhorn": ("10", "worse")}
    assert {row[3] for row in fresh.parts(found, PARTS).rows} == {"9"}


def test_dense_models_are_not_ranked():
    points = [replace(p, active=p.parameters) if p.variant == "softmax" else p for p in simulated()]
    assert "softmax" not in {row[3] for row in fresh.ranked(fresh.at_fresh_seeds(points)).rows}


def test_one_seed_decides_nothing_between_routers():
    rows = fresh.ranked(fresh.at_fresh_seeds(simulated(seeds=[4]))).rows
    assert {row[-1] for row in rows} == {"lowest", "open"}


@pytest.mark.parametrize("seeds", [2, 3])
def test_three_fresh_seeds_replace_those_that_chose(seeds):
    """Fewer do not; and each comparison is made once."""
    points = simulated(seeds=range(4, 4 + seeds))
    found = trend.compared(Evidence("x", "y", "softmax", 99, {}, tuple(points)))
    assert {(each.where, len(each.last.values)) for each in found} == {
        (fresh.WHERE, 3) if seeds == 3 else (tables.TUNED, 5)
    }
    assert [each.other for each in found] == ["crossed", "sinkhorn", "sinkhorn_crossed"]


def test_diverged_seeds_are_named():
    points = [replace(p, loss=math.nan) if (p.variant, p.seed) == ("softmax", 9) else p for p in simulated()]
    assert [*trend.diverged(points)] == [
        "softmax, size xs, rate 0.008 diverged with seeds [9]: no mean has these losses."
    ]


def test_parts_name_variants_of_the_study(tmp_path):
    with pytest.raises(StudyError, match=r"parts\.gate: nothing is no variant of this study"):
        study_of(tmp_path, parts={"gate": [["nothing", "softmax"]]})


def test_declared_parts_change_one_thing():
    """Both variants of each pair differ in the gate alone, or in the choice of experts alone."""
    study = read_study("confirm")
    gate, kind = "model.router.gate", "model.router.kind"
    usual = {"softmax": "softmax", "sinkhorn_bias": "sigmoid"}
    for (part, pairs), changes in zip(study.parts.items(), ({gate}, {kind}), strict=True):
        for pair in pairs:
            one, other = ({gate: usual[keys[kind]], **keys} for keys in (study.variants[v]["xs"] for v in pair))
            assert {key for key in one if one[key] != other[key]} == changes, part
            if changes == {gate}:
                assert (one[gate], other[gate]) == ("sigmoid", "softmax")
            else:
                assert (one[kind], other[kind]) == ("sinkhorn_bias", "softmax")
