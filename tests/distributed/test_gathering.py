"""Weights that are gathered while the forward pass runs are there before they are read."""

import pytest

from tests.distributed.gathering_probe import OTHERS
from tests.runtime.ranks import fork_script

pytestmark = pytest.mark.xdist_group("layouts")


@pytest.fixture(scope="module")
def ranks():
    seen = fork_script("tests.distributed.gathering_probe")
    assert seen["problems"] == []
    return seen["ranks"]


def same(run, other):
    return run["losses"] == other["losses"] and run["weights"] == other["weights"]


def test_every_bucket_size_gives_the_same_bits(ranks):
    for rank in ranks:
        apart = rank["apart"]["plain"]
        assert len(set(apart["losses"])) == len(apart["losses"])  # the weights move
        wrong = {size: run["losses"] for size, run in rank["sizes"].items() if not same(run, apart)}
        assert wrong == {}, apart["losses"]


def test_every_parameter_once_begins_a_bucket(ranks):
    for rank in ranks:
        assert {name for run in rank["sizes"].values() for name in run["first"]} == set(rank["names"])


@pytest.mark.parametrize("name", OTHERS)
def test_buckets_of_one_give_the_same_bits(ranks, name):
    for rank in ranks:
        assert same(rank["each"][name], rank["apart"][name])


def test_unwaited_weights_are_refused_by_name(ranks):
    for rank in ranks:
        uncalled = rank["refused"]["add_a_module_that_nobody_calls"]
        assert "decoder.layers.0.mixer.dt_proj.weight" in uncalled and "training.overlap=false" in uncalled
        for how in ("read_a_weight_first", "read_the_data_first"):
            early = rank["refused"][how]
            assert "decoder.layers.0.mixer.conv1d.weight" in early and "dt_proj" not in early


def test_type_check_of_unwaited_weight_passes(ranks):
    assert [rank["refused"]["look_at_the_data"] for rank in ranks] == ["", ""]
