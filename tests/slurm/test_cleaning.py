"""A corpus deduplicated and filtered by arrays of Slurm jobs."""

import json
import random
import re
import sys
import time

import pytest

from tests.slurm.conftest import REPOSITORY

pytest.importorskip("datatrove", reason="datatrove is not installed: pip install megatron-blackmamba[dedup]")
pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm_jobs")]
DATA = [sys.executable, "-m", "megatron_blackmamba", "data"]
FEW = ["--part-size", "1KB"]


@pytest.fixture
def raw(tmp_path):
    """Write two files with four documents in both, and return them."""
    choose = random.Random(0)
    texts = [" ".join("".join(choose.choices("abcdefgh", k=5)) for _ in range(50)) for _ in range(12)]
    for number in range(2):
        lines = (json.dumps({"text": text}) + "\n" for text in texts[number * 4 : number * 4 + 8])
        (tmp_path / f"{number}.jsonl").write_text("".join(lines))
    return sorted(tmp_path.glob("*.jsonl"))


def finished(slurm, job, out, name):
    """Wait until a command wrote its last file, or no task is left. Return its counts."""
    logs, stage = sorted((out / ".work").rglob("*.out")), out / ".work" / name
    assert slurm.wait(job, logs[-1] if logs else out / "none")["JobState"] == "COMPLETED"
    while not (stage / "done.json").exists() and slurm.run("squeue", "--noheader").stdout:  # the other tasks
        time.sleep(0.1)
    assert (stage / "done.json").exists(), "\n".join(log.read_text() for log in sorted(stage.rglob("*.out")))
    return json.loads((stage / "done.json").read_bytes())


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_arrays_of_jobs_remove_what_one_machine_removes(slurm, raw, tmp_path):
    tool, few = [*DATA, "dedup", *raw], [*FEW, "--buckets", "2", "--hashes", "3"]
    alone, together = tmp_path / "alone", tmp_path / "together"
    slurm.run(*tool, alone, *few, cwd=REPOSITORY)
    submitted = slurm.run(
        *(*tool, together, *few, "--slurm", "batch", "--memory", "1", "--time", "00:10:00"), cwd=REPOSITORY
    )
    assert "submitted 7 Slurm jobs" in submitted.stdout
    job = submitted.stdout.split()[-1]
    slurm.run("scontrol", "hold", job)  # the last of seven that wait for each other
    again = slurm.run(*tool, together, *few, "--slurm", "batch", cwd=REPOSITORY, check=False)
    assert again.returncode == 2 and re.search(rf"Slurm jobs .*\b{job}\b.* work in this folder", again.stderr)
    slurm.run("scontrol", "release", job)
    finished(slurm, job, together, "dedup")
    assert len(content(alone)) == 4 and content(together) == content(alone)
    assert len((alone / "removed.tsv").read_text().splitlines()) == 1 + 4


def test_rules_count_alike_in_jobs(slurm, raw, tmp_path):
    recipe = tmp_path / "rules.yaml"
    recipe.write_text("- gopher_quality: {min_doc_words: 20, min_stop_words: 0}\n- pii\n")
    raw[0].write_text(raw[0].read_text() + json.dumps({"text": "Too short to keep."}) + "\n")
    alone, together = tmp_path / "alone", tmp_path / "together"
    slurm.run(*DATA, "filter", recipe, *raw, alone, *FEW, cwd=REPOSITORY)
    jobs = ["--slurm", "batch", "--memory", "1", "--time", "00:10:00"]
    submitted = slurm.run(*DATA, "filter", recipe, *raw, together, *FEW, *jobs, cwd=REPOSITORY)
    counts = finished(slurm, submitted.stdout.split()[-1], together, "filter")
    assert content(together) == content(alone)
    assert [rule["removed"] for rule in counts["rules"] if rule["rule"] == "gopher_quality"] == [1]
