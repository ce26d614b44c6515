"""Some of the random cases of `random_parts`, at every kind of layer that parallel.context cuts."""

import pytest

from tests.distributed import random_parts
from tests.layers.sizes import PASSING
from tests.runtime.ranks import fork_script
from tests.thorough import thorough

pytestmark = pytest.mark.xdist_group("layouts")


@thorough
def test_random_parts_give_what_one_process_gives():
    found = fork_script("tests.distributed.random_parts", "--cases", "64")
    assert found["problems"] == []
    assert found["furthest"] > 0  # something was compared


def test_cases_cover_kinds_that_pass_states():
    drawn = [random_parts.case(number) for number in range(64)]
    assert set(PASSING) <= {case.pattern for case in drawn}
    assert {1, 2} <= {(case.tokens_BL.shape[1] - 1) // case.context for case in drawn}
