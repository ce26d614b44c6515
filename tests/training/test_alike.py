"""Ranks that were started differently: each is refused before the first step, with the difference."""

import pytest

from megatron_blackmamba.formats.run_folder import RunFolder
from tests.training.runs import SMALL

pytestmark = pytest.mark.xdist_group("forks")

THREE = ("training.global_batch=6", "training.micro_batch=2")


@pytest.mark.parametrize(
    ("key", "usual", "other"),
    [
        ("optimizer.learning_rate", "0.001", "0.002"),
        ("training.seed", "1234", "7"),
        ("parallel.expert", "1", "2"),  # other process groups: without the refusal both ranks wait for each other
    ],
)
def test_rank_with_another_config_is_refused(forks, tmp_path, key, usual, other):
    job = forks.run(tmp_path, [*SMALL, f"{key}={usual}"], unlike={1: [f"{key}={other}"]})
    assert job.wait() == [1, 1], job.output()
    for rank in (0, 1):
        output = (tmp_path / f"output_{rank}").read_text()
        assert f"  {key} is {other} on rank 1 (" in output and f") and {usual} on rank 0 (" in output
        assert "Start every rank with the same command" in output
    assert not RunFolder(tmp_path / "run").latest.exists()


def test_majority_is_taken_for_the_usual(forks, tmp_path):
    job = forks.run(tmp_path, [*SMALL, *THREE], ranks=3, unlike={0: ["training.seed=7"]})
    assert job.wait() == [1, 1, 1], job.output()
    assert "training.seed is 7 on rank 0 (" in job.output() and "on rank 1 (" in job.output()


def test_rank_with_other_data_is_refused(forks, tmp_path):
    job = forks.run(tmp_path, SMALL, trainer="OtherData")
    assert job.wait() == [1, 1], job.output()
    assert "  data.seed is 1235 on rank 1 (" in job.output() and "the same file of data.mixture" in job.output()
