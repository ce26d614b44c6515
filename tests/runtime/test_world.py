import json
import os
import subprocess
import sys

import pytest

from megatron_blackmamba.runtime.ports import free_port
from megatron_blackmamba.runtime.world import Place, PlaceError, find_place, set_address
from tests.runtime.ranks import ROOT, environment, fork_script
from tests.runtime.world_probe import CUDA_SETTINGS

pytestmark = pytest.mark.xdist_group("world")  # its processes start once, not once a worker
PROBE = "tests.runtime.world_probe"


@pytest.fixture(scope="module")
def probe():
    return fork_script(PROBE, "forked")


def answers(ranks):
    assert [rank.get("error") for rank in ranks] == [None] * len(ranks)
    return [rank["answer"] for rank in ranks]


def test_four_ranks_follow_megatron_order(probe):
    square = answers(probe["square"])
    assert [(r["tensor_rank"], r["pipeline_rank"]) for r in square] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [r["tp"] for r in square] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [r["pp"] for r in square] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [(r["first"], r["last"]) for r in square] == [(True, False)] * 2 + [(False, True)] * 2
    assert [r["sum_of_tensor_group"] for r in square] == [1, 1, 5, 5]
    assert [r["settings"] for r in square] == [CUDA_SETTINGS] * 4


def test_world_restarts_with_the_same_random_numbers(probe):
    assert all(r["left"] for r in answers(probe["square"]))
    (alone,) = answers(probe["alone"])
    assert alone["size"] == 1
    assert alone["drawn"][:2] == alone["drawn"][2:]
    assert alone["drawn"][0] != alone["drawn"][1]
    card = "lo" if sys.platform == "linux" else None
    assert alone["card"] == os.environ.get("GLOO_SOCKET_IFNAME", card)  # or gloo looks up the host name


def test_process_alone_has_no_threads_for_parallelism(probe):
    """Each gloo group has one that wakes a hundred times a second; two are the default group's and ours."""
    assert answers(probe["alone"])[0]["looping"] in (0, 2)  # 0 where /proc does not name threads


def test_unfit_process_count_is_refused_before_connecting(probe):
    for rank in answers(probe["refused"]):
        assert "3 processes cannot be divided by parallel.tensor=2" in rank["refused"]


def test_one_process_can_be_each_of_64_ranks(probe):
    (pretended,) = answers(probe["pretended"])
    assert pretended == {"distinct": 64, "left": True, "device": "cpu"}


def test_sruns_variables_are_enough_to_meet():
    shared = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": str(free_port())}
    command = [sys.executable, "-m", PROBE, "describe"]
    ranks = [
        subprocess.Popen(
            command,
            env=environment(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **shared),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    seen = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    assert [r["rank"] for r in seen] == [0, 1]
    assert [r["ep"] for r in seen] == [[0, 1], [0, 1]]
    assert [r["expert_rank"] for r in seen] == [0, 1]
    assert [r["settings"] for r in seen] == [CUDA_SETTINGS] * 2


def test_failing_rank_ends_all_with_one_traceback():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    done = subprocess.run([*torchrun, "-m", PROBE, "fail"], env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "rank 1 of 2 failed:\nTraceback" in done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert done.stderr.count("of 2 failed:") == 1
    assert done.stderr.index("rank 1 of 2 failed:") < done.stderr.index("ChildFailedError")


def test_batch_script_is_not_taken_for_a_rank():
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
    assert find_place(batch) == Place(0, 1, 0, "alone")


def test_torchrun_inside_srun_is_believed_before_slurm():
    both = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    both |= {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    assert find_place(both) == Place(9, 16, 1, "torchrun")


SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' is not a whole number from 0 to 1"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2' is not a whole number from 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not a whole number of at least 1"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "-1"}, "LOCAL_RANK='-1' is not a whole number from 0 to 0"),
        ({**SRUN, "SLURM_PROCID": "x"}, "SLURM_PROCID='x' is not a whole number from 0 to 1"),
        ({**SRUN, "SLURM_NTASKS": ""}, "SLURM_NTASKS='' is not a whole number of at least 1"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, "SLURM_NTASKS is missing"),
    ],
)
def test_odd_variables_of_a_launcher_are_refused(variables, said):
    with pytest.raises(PlaceError, match=said):
        find_place(variables)


@pytest.mark.parametrize(
    ("launcher", "variables", "said"),
    [
        ("torchrun", {}, "MASTER_ADDR is missing"),
        ("torchrun", {"MASTER_ADDR": "localhost"}, "MASTER_PORT is missing"),
        ("torchrun", {"MASTER_ADDR": "localhost", "MASTER_PORT": "99999"}, "MASTER_PORT='99999' is not a whole number"),
        ("srun", {"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID='x' is not a whole number"),
    ],
)
def test_odd_addresses_of_rank_zero_are_refused(monkeypatch, launcher, variables, said):
    monkeypatch.setattr("os.environ", variables)
    with pytest.raises(PlaceError, match=said):
        set_address(Place(0, 2, 0, launcher))
