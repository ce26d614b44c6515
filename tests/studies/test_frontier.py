"""Sizes of a model with experts against the best dense size: who chooses, who measures, and what is interpolated."""

import math
from dataclasses import replace

import pytest

from megatron_blackmamba.study.config import RATE
from studies import frontier
from tests.studies.test_differences import point

EXPERTS, DENSE = {"xs": 2000, "s": 8000}, {"xs": 500, "s": 2000}
AHEAD = 0.1
"""By how much experts are better than a dense model of as many active parameters."""


def law(active, flops):
    """Return a loss for which the best active size grows with FLOPs: a parabola, as the curves nearly are."""
    return 4 - 0.4 * math.log(flops / 1e9) + 0.05 * math.log(flops / (4e4 * active**2)) ** 2


def simulated(ahead=0.0, fresh=range(4, 10)):
    """Return points of two sizes with and without experts; one size has other budgets than the other.

    Seeds 1 to 3 try three rates. Their dense models of size xs are ahead by so much more than those of the others.
    """
    found = []
    for seed in (1, 2, 3, *fresh):
        for size, budgets in (("xs", range(8)), ("s", range(3, 11))):
            for flops in (2.0**budget * (1e9 if size == "xs" else 1.25e9) for budget in budgets):
                for variant, total in (("experts", EXPERTS[size]), ("dense", DENSE[size])):
                    loss = law(DENSE[size], flops) - AHEAD * (variant == "experts") + 0.01 * seed
                    loss -= ahead * (seed < 4 and (variant, size) == ("dense", "xs"))
                    own = {"parameters": total, "active": DENSE[size]}
                    one = replace(point(variant, size, seed, 3, loss, **own), flops=flops, budget=int(flops))
                    rates = (4e-3, 8e-3, 16e-3) if seed < 4 else (8e-3,)
                    found += [
                        replace(one, rate=rate, changed={RATE: rate}, loss=loss + 9 * abs(rate - 8e-3))
                        for rate in rates
                    ]
    return found


def rows_at(points, flops):
    return {row[1].split(" (")[0]: row[2:] for row in frontier.table(points, "experts").rows if row[0] == flops}


def test_each_size_meets_the_best_dense_size():
    """At 1.6e10 FLOPs the small models are best, at 1.3e11 the large ones; between budgets, curves are interpolated."""
    points = simulated()
    for flops, best in ((1.6e10, "xs"), (1.28e11, "s")):
        found = rows_at(points, f"{flops:.1e}")
        lowest = law(DENSE[best], flops)
        assert law(DENSE[best], flops) == min(law(active, flops) for active in DENSE.values())
        for size in ("xs", "s"):
            dense, seeds, difference, said = found[f"experts, {size}"]
            assert dense == {"xs": "dense, xs (500, smallest)", "s": "dense, s (2,000, largest)"}[best]
            true = law(DENSE[size], flops) - AHEAD - lowest
            assert float(difference.split(" ± ")[0].replace("−", "-")) == pytest.approx(true, abs=6e-4)
            assert (seeds, said) == ("6", "best size" if size == best else "")


def test_seeds_that_chose_measure_nothing():
    """They see the small dense model far ahead, and choose it; the others measure by how much it is behind."""
    at = 1.28e11
    dense, _, difference, _ = rows_at(simulated(ahead=3.0), f"{at:.1e}")["experts, s"]
    assert dense == "dense, xs (500, smallest)"
    assert float(difference.split(" ± ")[0]) == pytest.approx(law(2000, at) - AHEAD - law(500, at), abs=6e-4)


def test_nothing_is_compared_without_the_largest_size():
    """A smaller one would be best for lack of another: at 1e9, and beyond the end of the largest."""
    points = simulated()
    assert rows_at(points, "1.0e+09") == {} and [*rows_at(points, "1.3e+12")] == ["experts, s"]
    assert rows_at(points, "1.3e+12")["experts, s"][0] == "dense, s (2,000, the only size)"
    ended = [p for p in points if (p.variant, p.size) != ("dense", "s") or p.flops < 5e10]
    assert [rows_at(ended, flops) == {} for flops in ("4.0e+10", "6.4e+10", "1.3e+11")] == [False, True, True]


def test_best_models_are_chosen_by_the_same_seeds():
    """Seed 3 has a loss higher by 5; only the large dense model has it, which would seem the worse one."""
    points = [replace(p, loss=p.loss + 5 * (p.seed == 3)) for p in simulated()]
    some = [p for p in points if p.seed != 3 or (p.variant, p.size) == ("dense", "s")]
    assert rows_at(some, "1.3e+11")["experts, s"][0] == "dense, s (2,000, largest)"


def test_models_without_measuring_seeds_are_no_candidates():
    """The small dense model seems far ahead, but no seed measures it."""
    some = [p for p in simulated(ahead=3.0) if p.seed < 4 or (p.variant, p.size) != ("dense", "xs")]
    assert rows_at(some, "1.3e+11")["experts, s"][0] == "dense, s (2,000, the only size)"


def test_few_seeds_or_one_size_say_nothing():
    assert frontier.table(simulated(fresh=[4, 5]), "experts").rows == []
    apart = [p for p in simulated() if p.seed in (1, 2, 3, 7) or (p.seed < 7) == (p.variant == "experts")]  # share one
    assert frontier.table(apart, "experts").rows == [] == frontier.charts(apart, "experts", {})
    assert frontier.table([p for p in simulated() if p.size == "xs"], "experts").rows == []
    assert frontier.table(simulated(), "dense").rows == []


def test_picture_shows_every_size_and_what_experts_change():
    losses, changes = frontier.charts(simulated(), "experts", {"experts": "8 experts", "dense": "dense Mamba"})
    assert [line.name for line in losses.curves] == [
        *("8 experts: 0.002M parameters", "8 experts: 0.008M parameters"),
        *("dense Mamba: 0.0005M parameters", "dense Mamba: 0.002M parameters"),
    ]
    small = losses.curves[2]
    assert small.y == pytest.approx([law(500, flops) + 0.065 for flops in small.x])  # the mean of seeds 4 to 9
    assert max(line.x[-1] for line in losses.curves) == 1.28e12  # where experts and dense models end
    first, second, worse = changes.curves
    assert [len(first.x), len(second.x)] == [8, 12] and second.x[0] == 1e10 and set(worse.y) == {0}
    assert frontier.charts(simulated(), "dense", {}) == []


def test_one_model_of_two_sizes_is_one_curve():
    """The dense model of size s stands in the study as another variant of size xs too."""
    points = [
        replace(p, variant="dense_too", size="xs")
        if p.seed > 6 and p.parameters == 2000 and p.variant == "dense"
        else p
        for p in simulated()
    ]
    names = {"dense": "dense Mamba", "dense_too": "dense Mamba"}
    losses, _ = frontier.charts(points, "experts", names)
    assert [line.name for line in losses.curves].count("dense Mamba: 0.002M parameters") == 1
