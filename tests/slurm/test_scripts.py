"""The shipped scripts, as Slurm sees them."""

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.slurm.conftest import REPOSITORY

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm_jobs")]
SCRIPTS = sorted((REPOSITORY / "scripts/slurm").glob("*.sbatch"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_slurm_accepts_it_for_nodes_of_8_gpus(slurm, script, tmp_path):
    answer = slurm.run("sbatch", "--test-only", "--partition=gpu", script, cwd=tmp_path).stderr
    assert "to start at" in answer


def test_slurm_refuses_what_cannot_be(slurm, tmp_path):
    script = REPOSITORY / "scripts/slurm/pretrain_1.5b.sbatch"
    refused = slurm.run("sbatch", "--test-only", "--partition=gpu", "--nodes=9", script, cwd=tmp_path, check=False)
    assert refused.returncode != 0


def test_slurm_accepts_every_sbatch_line_of_docs(slurm, tmp_path):
    pages = [page.read_text().replace("\\\n", "") for page in (REPOSITORY / "docs").glob("*.md")]
    lines = [line for page in pages for line in page.splitlines() if line.startswith("sbatch ")]
    assert lines
    training = slurm.submit("--hold", "--wrap=true", cwd=tmp_path)
    for line in lines:
        arguments = shlex.split(line.replace("JOB", training), comments=True)[1:]
        answer = slurm.run("sbatch", "--test-only", "--partition=gpu", *arguments, cwd=REPOSITORY).stderr
        assert "to start at" in answer, line


def test_slurm_would_start_what_launch_writes(slurm, blackmamba, tmp_path):
    options = ("--nodes", "6", "--gpus-per-node", "h100:8", "--partition", "gpu", "--sbatch", "--comment=two words")
    job = tmp_path / "job.sbatch"
    job.write_text(blackmamba("launch", "blackmamba_2.8b", "data.kind=synthetic", *options, "--dry-run").stdout)
    assert "on nodes paper[1-6]" in slurm.run("sbatch", "--test-only", job, cwd=tmp_path).stderr


@pytest.mark.parametrize("file", [*SCRIPTS, *SCRIPTS[0].parent.glob("*.sh"), *SCRIPTS[0].parent.glob("*.env")], ids=str)
def test_bash_reads_it(file: Path):
    assert subprocess.run(["bash", "-n", file], capture_output=True, text=True).stderr == ""
