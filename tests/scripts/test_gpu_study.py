"""The study for a lent GPU, rehearsed small without one: each call goes on, and its points come back."""

import json
import os
import subprocess
import sys
import tarfile

import yaml

from tests.docs.session import ROOT
from tests.study.test_trunks import STUDY
from tests.thorough import thorough


@thorough
def test_calls_go_on_until_all_points_are_there(tmp_path):
    study = tmp_path / "mine.yaml"
    study.write_text(yaml.safe_dump(STUDY, sort_keys=False))
    first = call(study, tmp_path, MINUTES="0.1")
    assert first.returncode in (0, 75), first.stdout
    second = call(study, tmp_path)
    assert second.returncode == 0, second.stdout
    points = json.loads((tmp_path / "results" / "points.json").read_text())["points"]
    assert sorted((point["variant"], point["budget"]) for point in points) == [
        *(("dense", 2560), ("dense", 5120), ("experts", 2560), ("experts", 5120))
    ]
    assert (tmp_path / "results" / "study.html").is_file()
    said = (tmp_path / "results" / "study.log").read_text()
    assert [said.count(f" {number}/4 ") for number in (1, 2, 3, 4)] == [1, 1, 1, 1]  # no run is trained again


@thorough
def test_a_carried_corpus_is_not_gathered_again(tmp_path):
    study = tmp_path / "mine.yaml"
    study.write_text(yaml.safe_dump(STUDY | {"series": [{"sizes": ["small"], "seeds": [1], "budgets": 1}]}))
    assert call(study, tmp_path).returncode == 0
    carried = tmp_path / "carried"
    carried.mkdir()
    with tarfile.open(carried / "corpus.tar.xz", "w:xz") as archive:
        for name in ("mixture.yaml", "corpus.json", "tokens"):
            archive.add(tmp_path / "study" / "corpus" / name, f"corpus/{name}")
    done = call(study, tmp_path, carried, FOLDER=str(tmp_path / "other"))
    assert done.returncode == 0, done.stdout
    assert not (tmp_path / "other" / "corpus" / "text").exists()
    points = tmp_path / "results" / "points.json"
    assert len(json.loads(points.read_text())["points"]) == 2
    known = call(study, tmp_path, carried, FOLDER=str(tmp_path / "third"), POINTS=str(points))
    assert known.returncode == 0, known.stdout
    assert not (tmp_path / "third" / "runs").exists()  # another machine has trained them
    assert len(json.loads(points.read_text())["points"]) == 2


def test_without_gpu_the_study_for_cpus_is_named(tmp_path):
    done = call("", tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "`blackmamba study trend` is the same study for CPUs" in done.stdout


def call(study, folder, carried="", **more):
    how = {"PYTHON": sys.executable, "REHEARSE": str(study), "FOLDER": str(folder / "study"), "JOBS": "1"}
    return subprocess.run(
        ["bash", "scripts/gpu_study.sh", str(carried), str(folder / "results")],
        cwd=ROOT,
        env=os.environ | how | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
