import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_blackmamba.launch import all_ranks, measures
from megatron_blackmamba.launch.all_ranks import STAGES, examine_all
from megatron_blackmamba.launch.measures import pair_rounds
from megatron_blackmamba.launch.thresholds import ThresholdError, Thresholds, parse
from megatron_blackmamba.launch.verdict import Absent, Report, judge, judge_silence
from tests.runtime.ranks import fork_script
from tests.thorough import thorough

pytestmark = pytest.mark.xdist_group("world")  # where warm processes run anyway


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    """Return the findings of a check by three real ranks when something happens to node2."""
    return fork_script("tests.launch.all_ranks_probe", str(tmp_path_factory.mktemp("checks")))


@thorough
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("different", "NCCL_IB_TIMEOUT is 7, elsewhere missing"),
        ("slow", "rank 2: matrix products"),
        ("stopped", f"rank 2 stopped answering in {STAGES[1]}"),
        ("killed", f"rank 2 stopped answering in {STAGES[1]}"),
        ("absent", "rank 2 never reached rank 0"),
    ],
)
def test_the_deviating_node_is_named(checks, case, reason):
    node = "the node of rank 2" if case == "absent" else "node2"  # a launcher other than Slurm does not tell
    assert checks[case]["unfit"] == [node], checks[case]
    (line,) = (line for line in checks[case]["said"].splitlines() if line.startswith("unfit: "))
    assert line.startswith(f"unfit: {node}: ") and reason in line


@thorough
def test_slow_alike_is_said_and_not_excluded(checks):
    assert "no single node is the cause" in checks["different"]["said"]
    assert "node0" not in checks["different"]["unfit"]


def reports(nodes, **changed):
    made = [
        Report(rank, f"node{rank}", True, {"torch": "2.13"}, 0.0, 700.0, {"x": 40.0, "y": 20.0}, 300.0, 40.0)
        for rank in range(nodes)
    ]
    for name, value in changed.items():
        setattr(made[-1], name, value)
    return made


@pytest.mark.parametrize("nodes", [2, 3, 8])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"product": 500.0}, "matrix products 500 GFLOP/s, the others 700"),
        ({"facts": {"torch": "2.12"}}, "torch is 2.12, elsewhere 2.13"),
        ({"clock": -30.0}, "behind: look at its time service"),
        ({"pairs": {"x": 10.0, "y": 9.0}}, "bandwidth to its best partner 10 GB/s, the others 40"),
    ],
)
def test_each_deviation_is_judged(nodes, changed, said):
    verdict = judge(reports(nodes, **changed), Thresholds())
    if nodes == 2 and "pairs" in changed:  # which end of the only link is slow?
        assert verdict.unfit == {}
    else:
        assert list(verdict.unfit) == [f"node{nodes - 1}"]
        assert said in verdict.lines()[0]


def test_alike_ranks_are_fit():
    assert judge(reports(8), Thresholds()).lines() == []


def test_a_deviating_majority_is_not_excluded():
    made = reports(4)
    for report, clock in zip(made, (0.0, 100.0, 200.0, 300.0), strict=True):
        report.clock = clock
    verdict = judge(made, Thresholds())
    assert verdict.unfit == {} and "no node is left out" in verdict.problems[0]


def test_a_slow_network_everywhere_is_a_warning():
    verdict = judge(reports(4), Thresholds(pair_floor=100, all_reduce_floor=1000, all_to_all_floor=100))
    assert verdict.healthy and len(verdict.warnings) == 3


def test_a_head_node_that_nobody_reaches_is_named():
    absent = [Absent(rank, f"node{rank}", "never reached rank 0") for rank in (1, 2, 3)]
    assert list(judge_silence(absent, 4, 4, "node0").unfit) == ["node0"]
    assert list(judge_silence(absent[:1], 4, 4, "node0").unfit) == ["node1"]


def test_rank_that_cannot_reach_rank_zero_says_where(monkeypatch, capsys):
    variables = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 9}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(all_ranks, "_end_after", lambda seconds, why: None)
    assert examine_all(Thresholds(), 1.0, [], None) == 1
    assert "cannot reach rank 0 at 127.0.0.1:9" in capsys.readouterr().err


@thorough
def test_one_rank_alone_is_told_to_use_srun():
    done = subprocess.run(
        [sys.executable, "-m", "megatron_blackmamba", "doctor", "--all-ranks"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "one rank alone: start it with srun" in done.stdout


def test_products_are_timed_until_they_end(monkeypatch):
    """The clock is read only when the device is idle: a GPU starts products long before it computes them."""
    happened, clock = [], iter([100.0, 100.25, 100.5])

    def read_clock():
        happened.append("clock")
        return next(clock)

    monkeypatch.setattr(measures, "time", SimpleNamespace(perf_counter=read_clock))
    monkeypatch.setattr(measures, "_settle", lambda device: happened.append("idle"))
    assert measures.matrix_products(torch.device("cpu")) == 2 * (2 * 384**3) / 0.5 / 1e9
    assert happened == ["idle", "clock"] * 3


def test_rates_are_means_without_the_warm_up(monkeypatch):
    clock = itertools.count(100.0, step=1.5)
    monkeypatch.setattr(measures.time, "perf_counter", lambda: next(clock))
    calls = []
    assert measures._time(lambda: calls.append(1), torch.device("cpu")) == 1.5 / measures.REPEATS
    assert len(calls) == measures.REPEATS + 1


@pytest.mark.parametrize("nodes", range(1, 20))
def test_pairs_are_disjoint_and_partners_change(nodes):
    rounds = pair_rounds(nodes)
    met = [pair for pairing in rounds for pair in map(frozenset, pairing)]
    assert len(met) == len(set(met))
    for pairing in rounds:
        busy = [node for pair in pairing for node in pair]
        assert len(busy) == len(set(busy)) == nodes - nodes % 2
    if nodes > 2:
        assert all(sum(node in pair for pair in met) >= 2 for node in range(nodes))
    assert len(rounds) <= max(nodes, 1).bit_length() + 2


def test_unknown_thresholds_are_refused():
    assert parse(["disk=20"]).disk == 20
    for wrong in ("disc=20", "disk=fast", "disk"):
        with pytest.raises(ThresholdError, match="--threshold"):
            parse([wrong])
