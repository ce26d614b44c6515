"""The study for a lent GPU, rehearsed small without one: each call goes on, and its points come back."""

import json
import os
import subprocess
import sys

import yaml

from tests.docs.session import ROOT
from tests.study.test_trunks import STUDY
from tests.thorough import thorough


@thorough
def test_calls_go_on_until_all_points_are_there(tmp_path):
    study = tmp_path / "mine.yaml"
    study.write_text(yaml.safe_dump(STUDY | {"tuning": {"size": "small", "learning_rates": [4.0e-3]}}, sort_keys=False))
    first = call(study, tmp_path, MINUTES="0.1")
    assert first.returncode in (0, 75), first.stdout
    second = call(study, tmp_path)
    assert second.returncode == 0, second.stdout
    points = json.loads((tmp_path / "results" / "points.json").read_text())["points"]
    assert sorted((point["variant"], point["budget"]) for point in points) == [
        *(("dense", 2560), ("dense", 5120), ("experts", 2560), ("experts", 5120))
    ]
    assert (tmp_path / "results" / "study.html").is_file()


def test_without_a_gpu_the_study_for_cpus_is_named(tmp_path):
    done = subprocess.run(
        ["bash", "scripts/gpu_study.sh", "", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "`blackmamba study trend` is the same study for CPUs" in done.stderr


def call(study, folder, **more):
    return subprocess.run(
        ["bash", "scripts/gpu_study.sh", "", str(folder / "results")],
        cwd=ROOT,
        env=os.environ
        | {"PYTHON": sys.executable, "REHEARSE": str(study), "FOLDER": str(folder / "study"), "JOBS": "1"}
        | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
