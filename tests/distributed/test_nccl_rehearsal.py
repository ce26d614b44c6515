"""The comparison of layouts on one GPU (tests/gpu/nccl_layouts.py), run over gloo: it passes, and it catches faults."""

import pytest

from tests.distributed.rehearsal_probe import LAYOUTS
from tests.gpu.nccl_cases import Layout, tasks
from tests.gpu.nccl_layouts import Results
from tests.runtime.ranks import fork_script
from tests.thorough import selected, unless

pytestmark = pytest.mark.xdist_group("layouts")
HUNG = ("skipped_collective", "sleeping_rank")


@pytest.fixture(scope="module")
def rows(request, tmp_path_factory):
    return fork_script("tests.distributed.rehearsal_probe", str(tmp_path_factory.mktemp("nccl")), *selected(request))


@pytest.mark.parametrize("name", unless(["dp2"], [name for name, layout in LAYOUTS.items() if layout.ranks < 8]))
def test_layout_agrees_with_one_process(rows, name):
    assert rows[name]["problems"] == []
    assert rows[name]["replicas"] and len(rows[name]["curve"]) == rows[name]["steps"]


@pytest.mark.parametrize("name", ["early_gradients"])
def test_gradients_read_early_are_caught(rows, name):
    assert any("gradient norm of step 1" in problem for problem in rows[name]["problems"])


@pytest.mark.parametrize("name", ["late_weights"])
def test_weights_gathered_late_are_caught(rows, name):
    (problem,) = rows[name]["problems"]
    assert problem.startswith("losses: ")


@pytest.mark.parametrize("name", unless([], HUNG))
def test_missing_rank_becomes_a_report(rows, name):
    (problem,) = rows[name]["problems"]
    assert "ended with code 70" in problem
    assert "rank 1 (" in problem and "has not arrived at collective" in problem


def test_finished_layouts_are_skipped(tmp_path):
    results = Results(tmp_path / "results.json")
    (alone, task, apart) = tasks([Layout("dp2", 2)])
    assert alone.layout.ranks == 1 and task.keys == ["dp2 bf16", "dp2 fp32"] and apart.keys[0] == "dp2 bf16 apart"
    results.put("rows", "dp2 bf16", {"problems": []})
    results.put("rows", "dp2 fp32", {"problems": ["far from one process"]})
    again = Results(tmp_path / "results.json")
    assert [again.passed("rows", key) for key in (*task.keys, "dp2 bf16 apart")] == [True, False, False]
