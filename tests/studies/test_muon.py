"""The study `muon`: its analysis is right on simulated losses, and a pair differs in its optimizer alone."""

import numpy as np
import pytest

from megatron_blackmamba.study.config import RATE, PrimaryConfig, StudyError, read_study
from megatron_blackmamba.study.points import Evidence, sealed
from studies import differences
from studies.trend import decisions
from tests.study.test_trunks import point, study_of

SEEDS = [14, 15, 16, 17, 18]
BUDGETS = [1000, 2000, 4000, 8000, 16000]
PAIR = PrimaryConfig(one="softmax_muon", other="softmax", size="s", budget=16000, seeds=SEEDS)
GAINS = PAIR.model_copy(update={"other": "mamba_muon", "gain_on": ("softmax", "mamba")})
MEANS = {"softmax": 0.0, "mamba": 0.1}


def simulated(draw, saved, more=0.0, rest=0.005):
    """Return losses that fall with tokens. Muon needs the part `saved` of them; with experts it gains `more`."""
    found = []
    for seed in SEEDS:
        shared = draw.normal(0, 0.02)
        for model, mean in MEANS.items():
            for optimizer, part in (("", 1.0), ("_muon", saved)):
                gain = more if (model, optimizer) == ("softmax", "_muon") else 0.0
                for budget in BUDGETS:
                    loss = mean + shared - gain - 0.3 * np.log(budget / part / 1000) + 4 + draw.normal(0, rest)
                    found.append(point(model + optimizer, seed, budget, loss))
    return found


def test_steps_for_equal_loss_are_recovered():
    """Of 200 simulated studies, 95% have the true part in their interval: within three standard errors of a count."""
    draw, inside = np.random.default_rng(1), 0
    for _ in range(200):
        said = differences.flops_for_equal_loss(simulated(draw, 0.8), PAIR)
        low, high = map(float, said.partition("(")[2].rstrip(")").split(" to "))
        inside += low - 0.005 <= 0.8 <= high + 0.005  # as printed
    assert inside >= 180


@pytest.mark.parametrize(
    "more, verdicts", [(0.05, {"(softmax_muon − softmax) is lower"}), (-0.05, {"(mamba_muon − mamba) is lower"})]
)
def test_other_gain_with_experts_has_its_sign(more, verdicts):
    draw = np.random.default_rng(2)
    assert {differences.decide(simulated(draw, 0.8, more), GAINS).verdict for _ in range(50)} == verdicts


def test_equal_gains_rarely_differ():
    """Of 400 simulated studies, 5% find a difference: within three standard errors of a count."""
    draw = np.random.default_rng(3)
    found = [differences.decide(simulated(draw, 0.8), GAINS).verdict for _ in range(400)]
    assert sum("is lower" in verdict for verdict in found) == pytest.approx(20, abs=13)


def test_slower_muon_has_a_bound():
    """Where Muon's curve ends above the loss, nothing is extrapolated."""
    said = differences.flops_for_equal_loss(simulated(np.random.default_rng(4), 1.5, rest=0.001), PAIR)
    assert said is None


def test_gains_wait_for_all_four_variants():
    points = simulated(np.random.default_rng(5), 0.8)
    some = [p for p in points if (p.variant, p.seed) != ("mamba", 18)]
    (line,) = decisions(Evidence("x", "y", "softmax", 9, {}, tuple(some)), [GAINS])
    assert line.endswith("4 of 5 seeds are finished: no conclusion before all seeds are finished.")
    assert not sealed(some, [GAINS])
    whole, _, ratio = decisions(Evidence("x", "y", "softmax", 9, {}, tuple(points)), [PAIR])
    assert "softmax_muon has the lower loss" in whole
    assert ratio.startswith("softmax_muon needs 0.8") and ratio.endswith("of the FLOPs for the loss of softmax.")


def test_gain_on_names_variants_of_the_study(tmp_path):
    wrong = {"one": "experts", "other": "dense", "gain_on": ["experts", "odd"], "size": "small", "budget": 2560}
    with pytest.raises(StudyError, match=r"primary\.0: no such variant"):
        study_of(tmp_path, primary=[{**wrong, "seeds": [4, 5]}])


def test_declared_pairs_differ_in_their_optimizer_alone():
    muon, confirm = read_study("muon"), read_study("confirm")
    assert (muon.set, muon.corpus, muon.base) == (confirm.set, confirm.corpus, confirm.base)
    assert muon.tuning == confirm.tuning  # so that points of seeds 1 to 3 are shared
    own = {"optimizer.kind": "muon", "optimizer.momentum": 0.95}
    for adam in ("softmax", "mamba", "sinkhorn"):
        for size, keys in muon.variants[adam].items():
            assert muon.variants[f"{adam}_muon"][size] == keys | own
    assert (
        muon.variants["softmax"] == confirm.variants["softmax"] and muon.variants["mamba"] == confirm.variants["mamba"]
    )
    assert all(pair.seeds == SEEDS for pair in muon.primary)
    spent = {seed for series in confirm.series for seed in series.seeds} | set(muon.seeds)
    assert not spent & set(SEEDS)
    for series in muon.series:
        assert series.seeds == (SEEDS if series.best_rate else [1, 2, 3])
    tried = {(v, s): set() for v in muon.variants for s in muon.tokens}
    for series in muon.series:
        for variant in series.variants or muon.variants:
            for size in series.sizes if not series.best_rate else ():
                tried[variant, size] |= set(series.grid.get(RATE, muon.tuning.learning_rates))
    assert all(len(rates) >= 3 for rates in tried.values())  # one can lie between two others
    assert all(tried[f"{v}_muon", s] == tried[v, s] for v in ("softmax", "mamba", "sinkhorn") for s in muon.tokens)
