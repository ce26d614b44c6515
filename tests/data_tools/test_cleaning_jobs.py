"""Slurm jobs that work in an output folder, as squeue tells of them; tests/slurm has a real Slurm."""

import pytest

from megatron_blackmamba.data_tools.cleaning import JOBS, record_job, refuse_unfinished_jobs
from megatron_blackmamba.data_tools.rejects import InputError


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Return a function that sets what squeue prints, or its exit code."""
    program = tmp_path / "bin/squeue"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", str(program.parent))

    def prints(text, code=0):
        program.write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
        program.chmod(0o755)

    return prints


@pytest.fixture
def work(tmp_path):
    assert [record_job(tmp_path / JOBS, f"Submitted batch job {job}\n") for job in (12, 13, 14)] == ["12", "13", "14"]
    return tmp_path


def test_running_and_waiting_jobs_are_named(work, squeue):
    squeue("3 None\n12 None\n12 Resources\n13 Dependency")
    for _ in range(2):  # a refused command does not forget them
        with pytest.raises(InputError, match=r"jobs 12, 13 work in this folder.*scancel 12 13$"):
            refuse_unfinished_jobs(work)


@pytest.mark.parametrize("queue", ["", "3 None", "13 DependencyNeverSatisfied"])
def test_ended_jobs_are_forgotten(work, squeue, queue):
    squeue(queue)
    refuse_unfinished_jobs(work)
    assert not (work / JOBS).exists()


def test_jobs_are_kept_when_squeue_fails(work, squeue):
    squeue("unreachable", code=1)
    with pytest.raises(InputError, match=f"{JOBS}: lists Slurm jobs 12, 13, 14"):
        refuse_unfinished_jobs(work)
    (work / "bin/squeue").unlink()
    with pytest.raises(InputError, match="squeue"):
        refuse_unfinished_jobs(work)
