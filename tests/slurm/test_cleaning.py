"""A corpus deduplicated by arrays of Slurm jobs."""

import json
import random
import re
import sys
import time

import pytest

from tests.slurm.conftest import REPOSITORY

pytest.importorskip("datatrove", reason="datatrove is not installed: pip install megatron-blackmamba[dedup]")
pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm_jobs")]


def test_arrays_of_jobs_remove_what_one_machine_removes(slurm, tmp_path):
    choose = random.Random(0)
    texts = [" ".join("".join(choose.choices("abcdefgh", k=5)) for _ in range(50)) for _ in range(12)]
    for number in range(2):
        lines = (json.dumps({"text": text}) + "\n" for text in texts[number * 4 : number * 4 + 8])
        (tmp_path / f"{number}.jsonl").write_text("".join(lines))
    tool = [sys.executable, "-m", "megatron_blackmamba", "data", "dedup", *sorted(tmp_path.glob("*.jsonl"))]
    few = ["--part-size", "1KB", "--buckets", "2", "--hashes", "3"]
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
    logs = sorted((together / ".work").rglob("*.out"))
    shown = slurm.wait(job, logs[-1] if logs else tmp_path / "none")
    assert shown["JobState"] == "COMPLETED"
    done = together / ".work/dedup/done.json"
    while not done.exists() and slurm.run("squeue", "--noheader").stdout:  # the other tasks
        time.sleep(0.1)
    assert done.exists(), "\n".join(log.read_text() for log in sorted((together / ".work").rglob("*.out")))

    def content(folder):
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    assert len(content(alone)) == 4 and content(together) == content(alone)
    assert len((alone / "removed.tsv").read_text().splitlines()) == 1 + 4
