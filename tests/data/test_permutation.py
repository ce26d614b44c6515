from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_blackmamba.data.permutation import Permutation


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 5000), st.binary(max_size=16))
def test_every_place_is_taken_exactly_once(size, key):
    assert sorted(Permutation(size, key)) == [*range(size)]


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 2**61), st.binary(max_size=16), st.floats(0, 1, exclude_max=True))
def test_the_position_of_a_place_goes_there(size, key, fraction):
    order, place = Permutation(size, key), int(fraction * size)
    assert order[order.position_of(place)] == place


@pytest.mark.parametrize("place", [-1, 7])
def test_places_outside_are_refused(place):
    with pytest.raises(IndexError, match=f"place {place} of a permutation of 7"):
        Permutation(7, b"small").position_of(place)


def test_order_is_stable_across_versions():
    order = Permutation(146_484_375, b"1234 fingerprint 0")
    assert [order[p] for p in (0, 1, 2, 146_484_374)] == [86314296, 18087515, 137665111, 51651145]
    assert [*Permutation(7, b"small")] == [0, 4, 3, 5, 2, 1, 6]


def test_all_orders_of_four_things_are_equally_likely():
    keys = 24 * 200
    seen = Counter(tuple(Permutation(4, b"%d" % key)) for key in range(keys))
    expected = keys / 24
    chi_squared = sum((seen[order] - expected) ** 2 / expected for order in permutations(range(4)))
    assert chi_squared < 58  # 23 degrees of freedom: one honest shuffle in 10,000 exceeds 58.6


@pytest.mark.parametrize("size", [1000, 100_003])
def test_neighbours_end_up_far_apart_and_unrelated(size):
    places = np.array([*Permutation(size, b"neighbours")])
    steps = np.abs(np.diff(places))
    assert (steps == 1).mean() < 5 / size**0.5
    assert abs(steps.mean() / size - 1 / 3) < 3 / size**0.5  # the mean distance of two random places
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 5 / size**0.5


def test_two_keys_give_unrelated_orders():
    a, b = (np.array([*Permutation(10_000, key)]) for key in (b"epoch 0", b"epoch 1"))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    assert (a == b).sum() < 10


def test_positions_outside_are_refused():
    order = Permutation(10, b"")
    for position in (-1, 10):
        with pytest.raises(IndexError, match=str(position)):
            order[position]
    with pytest.raises(ValueError, match="not 0"):
        Permutation(0, b"")
