"""The comparison of layouts on one GPU (tests/gpu/nccl_layouts.py), run over gloo: it passes, and it catches faults."""

import pytest

from tests.distributed.rehearsal_probe import LAYOUTS
from tests.gpu.nccl_cases import LAYOUTS as LAYOUTS_IN_ORDER
from tests.gpu.nccl_cases import STEPS, Layout, seconds, tasks
from tests.gpu.nccl_layouts import DRILL_SECONDS, START_SECONDS, Results
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
    (alone, task, apart, bf16_alone, bf16, bf16_apart) = tasks([Layout("dp2", 2)])
    assert alone.layout.ranks == bf16_alone.layout.ranks == 1 and alone.keys != bf16_alone.keys
    assert [*task.keys, *apart.keys, *bf16.keys, *bf16_apart.keys] == [
        *("dp2 fp32", "dp2 fp32 apart", "dp2 bf16", "dp2 bf16 apart")
    ]
    results.put("rows", "dp2 fp32", {"problems": []})
    results.put("rows", "dp2 bf16", {"problems": ["far from one process"]})
    again = Results(tmp_path / "results.json")
    assert [again.passed("rows", key) for key in ("dp2 fp32", "dp2 bf16", "dp2 bf16 apart")] == [True, False, False]


def test_every_layout_in_fp32_fits_a_call():
    """A call of nine minutes holds the drills and, in fp32, each layout; within it no kind of variant is left out."""
    todo = [
        task for task in tasks(LAYOUTS_IN_ORDER) if task.variants[0].precision == "fp32" and task.variants[0].overlap
    ]
    needed = START_SECONDS + DRILL_SECONDS + sum(seconds(task, STEPS, 4) for task in todo)
    assert {task.layout.name for task in todo} >= {layout.name for layout in LAYOUTS_IN_ORDER}
    assert needed < 540
