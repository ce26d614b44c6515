"""Ranks that were started differently: each is refused before the first step, with the difference."""

import sys

import pytest

from megatron_blackmamba.config import load
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.training.start import alike
from tests.training.runs import SMALL

pytestmark = pytest.mark.xdist_group("forks")

THREE = ("training.global_batch=6", "training.micro_batch=2")


@pytest.mark.parametrize(
    ("key", "usual", "other"),
    [
        ("optimizer.learning_rate", "0.001", "0.002"),
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


def start(monkeypatch):
    """Return what must be equal on all ranks."""
    seen = []
    monkeypatch.setattr(alike, "_refuse_unlike", lambda mine, remedy: seen.append(mine))
    alike.refuse_unlike_starts(load("tiny"))
    return seen[0]


@pytest.mark.parametrize("name", ["BLACKMAMBA_ISA", "NVIDIA_TF32_OVERRIDE"])
def test_variables_that_change_numbers_belong_to_a_start(monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    assert name not in start(monkeypatch)
    monkeypatch.setenv(name, "0")
    assert start(monkeypatch)[name] == "0"


@pytest.mark.parametrize("file", ["unlike_layers.py", "unlike_layers/__init__.py"])
def test_imported_code_belongs_to_a_start(monkeypatch, tmp_path, file):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("BLACKMAMBA_IMPORT", "unlike_layers")
    assert start(monkeypatch)["code of unlike_layers"] == "not imported"
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("SCALE = 1")
    __import__("unlike_layers")
    try:
        before = start(monkeypatch)
        path.write_text("SCALE = 2")
        after = start(monkeypatch)
    finally:
        del sys.modules["unlike_layers"]
    assert before.pop("code of unlike_layers") != after.pop("code of unlike_layers")
    assert before == after
