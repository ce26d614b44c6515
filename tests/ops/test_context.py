"""Sequences that three ranks share give what one process gives: outputs and every gradient."""

import pytest
import torch

from tests.ops import context_probe as probe
from tests.ops.implementations import assert_close
from tests.runtime.ranks import run_script
from tests.thorough import selected, thorough

pytestmark = pytest.mark.xdist_group("layouts")


EVERYDAY = [case for case in probe.cases() if case[1] == "some" and case[2] not in probe.INTERPRETED]
OTHERS = [pytest.param(case, marks=thorough) for case in probe.cases() if case not in EVERYDAY]


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    assert run_script("tests.ops.context_probe", str(folder), *map("/".join, selected(request, "case"))) == []
    return [torch.load(folder / f"{rank}.pt") for rank in range(len(probe.PARTS))]


@pytest.mark.parametrize("case", [*EVERYDAY, *OTHERS], ids="-".join)
def test_parts_give_what_the_whole_gives(ranks, case):
    operation, reset, backend = case
    whole = probe.run(operation, reset, "float64", None, slice(None))
    parts = [rank[case] for rank in ranks]
    joined = {
        name: torch.cat([part[name] for part in parts], dim=1)
        if name.removeprefix("gradient of ") in probe.OF_TIME | {"y"}
        else sum(part[name] for part in parts)
        for name in whole
    }
    assert_close(joined, whole, tolerance=1e-12 if backend == "float64" else 1e-5)


def test_states_matter_beyond_the_next_part():
    tensors, _ = probe.problem("scan", "none")
    delta = torch.nn.functional.softplus(tensors["delta"] + tensors["delta_bias"])
    middle = slice(*probe.PARTS[1])
    left = torch.exp(delta[:, middle].sum(1)[:, :, None] * tensors["A"])
    assert left.max() > 0.1  # else the first part could not change the third
