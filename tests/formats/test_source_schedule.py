from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.mixture_scale import locate_range
from megatron_blackmamba.formats.source_schedule import Blend, Schedule, _Node

BOUND = 1.68
PAPER = [300 * 2, 600 * Fraction("1.2"), 250 * Fraction("0.75"), 50 * 5, 40 * 2, Fraction("2.2") * 5]
weights = st.lists(st.integers(0, 10**12), min_size=1, max_size=40).filter(any)
uneven_weights = st.lists(st.integers(0, 40), min_size=1, max_size=12).map(lambda exponents: [2**e for e in exponents])


def worst_deviation(schedule, first, end):
    """Return the largest deviation of any source at any prefix that starts at `first`, in samples."""
    source, _ = locate_range(schedule, first, end)
    length = np.arange(1, end - first + 1)
    blend = schedule.blends[schedule.starts.index(first)]
    return max(
        np.abs(np.cumsum(source == i) - float(probability) * length).max()
        for i, probability in enumerate(blend.probabilities)
    )


@settings(deadline=None, max_examples=150)
@given(st.one_of(weights, uneven_weights))
def test_every_prefix_is_within_two_samples_of_shares(weights):
    assert worst_deviation(Schedule([weights]), 0, 3000) < BOUND


def test_fibonacci_weights_stay_within_the_bound():
    fibonacci = [1, 1]
    while len(fibonacci) < 25:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    assert worst_deviation(Schedule([fibonacci]), 0, 200_000) < BOUND


def test_the_papers_mixture_in_its_first_million_samples():
    assert worst_deviation(Schedule([PAPER]), 0, 1_000_000) < BOUND


@settings(deadline=None, max_examples=50)
@given(weights, st.lists(st.tuples(weights, st.integers(1, 300)), max_size=3))
def test_sources_continue_without_gap_through_all_phases(first, later):
    phases, starts = [first], [0]
    for phase, length in later:
        phases.append(phase)
        starts.append(starts[-1] + length)
    width = min(len(phase) for phase in phases)
    phases = [phase[:width] if any(phase[:width]) else [1] * width for phase in phases]
    schedule, end = Schedule(phases, starts), starts[-1] + 200
    source, within = locate_range(schedule, 0, end)
    for i in range(width):
        assert np.array_equal(within[source == i], np.arange((source == i).sum()))
    assert [schedule.locate(k) for k in range(end)] == list(zip(source.tolist(), within.tolist(), strict=True))
    for k in (0, *starts[:-1], end // 3, end - 1):
        assert schedule.sample_of(*schedule.locate(k), end) == k
        assert schedule.sample_of(*schedule.locate(k), k) is None
    for k in (0, 1, *starts, end // 2, end):
        assert schedule.counts(k) == np.bincount(source[:k], minlength=width).tolist()


@settings(deadline=None)
@given(st.integers(0, 2**43), st.integers(0, 2**40))
def test_split_rounds_exactly_beyond_64_bits(samples, share):
    node = _Node(0, 1, share)
    exact = int(Fraction(samples * share, 2**40) + Fraction(1, 2))
    assert node.to_left(samples) == exact
    assert node.to_left(np.array([samples], np.uint64))[0] == exact


def test_each_phase_keeps_its_weights_from_its_start():
    schedule = Schedule([[3, 1, 0], [1, 1, 2]], [0, 1001])
    assert worst_deviation(schedule, 0, 1001) < BOUND
    assert worst_deviation(schedule, 1001, 4000) < BOUND
    assert schedule.counts(1001)[2] == 0


def test_equal_weights_are_ordered_by_name():
    one, other = Blend([1, 1, 2], ["x", "y", "z"]), Blend([2, 1, 1], ["z", "y", "x"])
    there = ["x", "y", "z"]
    back = ["z", "y", "x"]
    assert [there[one.locate(k)[0]] for k in range(50)] == [back[other.locate(k)[0]] for k in range(50)]


def test_order_is_stable_across_versions():
    places = [Schedule([PAPER]).locate(k) for k in (0, 1, 2, 3, 10**6, 146_484_374)]
    assert places == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 101433), (0, 47546997)]


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="all zero"):
        Blend([0, 0])
    with pytest.raises(ValueError, match="negative"):
        Blend([2, -1])
    with pytest.raises(ValueError, match="later"):
        Schedule([[1], [1], [1]], [0, 5, 5])
    with pytest.raises(IndexError):
        Schedule([[1]]).locate(-1)
