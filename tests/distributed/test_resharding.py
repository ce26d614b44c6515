"""Checkpoints do not care which layout wrote them: weights, optimizer and position go on under any other."""

import pytest

from tests.distributed.resharding_probe import STEPS_EACH, legs
from tests.runtime.ranks import run_script

pytestmark = pytest.mark.xdist_group("resharding")


CLOSENESS = {"fp64": 1e-10, "bf16": 2e-2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("resharding"))
    return run_script("tests.distributed.resharding_probe", folder, *CLOSENESS)


@pytest.mark.parametrize("precision, closeness", CLOSENESS.items())
def test_resharded_run_matches_undisturbed_run(runs, precision, closeness):
    seen = runs[precision]
    assert seen["errors"] == []
    assert len(seen["carried"]) == len(seen["alone"]) == STEPS_EACH * len(legs(precision)) >= 10
    assert seen["alone"][-1] < seen["alone"][0] - 0.3
    alone, carried = seen["validation"]
    assert len(alone) == len(legs(precision))
    for a, b in ((seen["alone"], seen["carried"]), (alone, carried)):
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < closeness
