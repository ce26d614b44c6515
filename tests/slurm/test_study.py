"""A study whose runs are Slurm jobs."""

import json
import re
import sys

import pytest
import yaml

from megatron_blackmamba.runtime.exits import STOPPED_ON_REQUEST
from megatron_blackmamba.study.config import read_study
from megatron_blackmamba.study.runs import Study
from tests.study.test_study import finish

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm_jobs")]


def test_study_submits_each_run_once_and_collects_it(slurm, tmp_path):
    content = read_study("smoke").model_dump() | {"ablations": {}, "seeds": [1], "tokens": {"small": 64 * 4 * 5}}
    content["variants"].pop("mamba")
    file = tmp_path / "short.yaml"
    file.write_text(yaml.safe_dump(content))
    study = Study("short", read_study(str(file)), tmp_path / "study")
    for number, cell in enumerate(study.tuning()):
        finish(cell, 3.0 + number)
    words = ["study", str(file), "--folder", str(study.folder), "--slurm", "--gpus", "0", "--time", "30"]
    words += ["--sbatch=--hold"]  # or this short run may end before the second call looks

    def call():
        return slurm.run(sys.executable, "-m", "megatron_blackmamba", *words, cwd=tmp_path, check=False)

    first, second = call(), call()
    assert first.returncode == second.returncode == STOPPED_ON_REQUEST, first.stderr + second.stderr
    (job,) = re.findall(r"run-blackmamba-small-seed1: job (\d+)", first.stderr)
    assert ": job " not in second.stderr, "a run that is in the queue was submitted again"
    slurm.run("scontrol", "release", job)
    (cell,) = study.runs(study.learning_rates())
    log = cell.folder.logs / f"{job}.log"
    assert slurm.wait(job, log)["JobState"] == "COMPLETED", log.read_text()
    last = call()
    assert last.returncode == 0, last.stderr
    results = json.loads((study.folder / "results.json").read_text())
    last = results["points"][-1]
    assert (last["kind"], last["variant"], last["seed"], last["tokens"]) == ("run", "blackmamba", 1, 64 * 4 * 5)
    assert "blackmamba" in (study.folder / "study.html").read_text()
