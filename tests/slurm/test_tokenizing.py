"""A corpus tokenized by an array of jobs."""

import gzip
import json
import sys
from pathlib import Path

import pytest

from tests.slurm.conftest import REPOSITORY

DATA = (sys.executable, "-m", "megatron_blackmamba", "data")
pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm_jobs")]


def write_corpus(folder: Path, files: int = 5) -> list[Path]:
    paths = [folder / f"part_{i}.jsonl" for i in range(files)]
    for i, path in enumerate(paths):
        lines = (
            json.dumps({"text": f"document {j} of file {i}: " + "the quick brown fox " * (j % 7)}) for j in range(40)
        )
        path.write_text("\n".join(lines) + "\n")
    return paths


def test_job_array_makes_the_shards_of_one_machine(slurm, tmp_path):
    corpus = write_corpus(tmp_path)
    tool = [sys.executable, "-m", "data_tools", *map(str, corpus), "--shard-size", "1KB"]
    alone = tmp_path / "alone"
    slurm.run(*tool[:-2], alone, "--train-tokenizer", "300", *tool[-2:], cwd=REPOSITORY)
    together = tmp_path / "together"
    job = slurm.submit(
        *("--array=3-5", "--cpus-per-task=2", "--mem=1G", f"--output={tmp_path}/%a.log"),
        *(REPOSITORY / "scripts/slurm/tokenize_array.sbatch", *corpus, together),
        *("--tokenizer", alone / "tokenizer.json", "--shard-size", "1KB"),
        cwd=REPOSITORY,
        PYTHON=sys.executable,
    )
    for task in (3, 4, 5):
        shown = slurm.wait(f"{job}_{task}", tmp_path / f"{task}.log")
        assert shown["JobState"] == "COMPLETED", (tmp_path / f"{task}.log").read_text()
        assert "share" in (tmp_path / f"{task}.log").read_text()

    def shards(folder: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.suffix in (".bin", ".idx")}

    assert len(shards(alone)) == 2 * len(corpus)
    assert shards(together) == shards(alone)


def test_printed_jobs_go_from_download_to_shards(slurm, tmp_path):
    """A stand-in for `hf` downloads: it copies a corpus, at the second line of the job."""
    published = tmp_path / "published"
    published.mkdir()
    for path in write_corpus(published):
        path.with_suffix(".json.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    slurm.run(*DATA, "tokenize", published, tmp_path / "bpe", "--train-tokenizer", "300", cwd=tmp_path)
    hub = tmp_path / "bin/hf"
    hub.parent.mkdir()
    hub.write_text(f'#!/bin/bash\n[[ "$*" == *--dry-run ]] || cp -r {published} "${{@: -1}}"\n')
    hub.chmod(0o755)
    options = ["--slurm", "batch", "--cores", "2", "-t", "bpe/tokenizer.json", "--raw", ".", "--tokens", "tokens"]
    script = slurm.run(*DATA, "corpora", "code", *options, cwd=tmp_path).stdout
    script = script.replace("16G", "1G").replace("0.1%", "20%")
    path = f"{hub.parent}:{slurm.env['PATH']}"
    slurm.run("bash", "-ec", script, cwd=tmp_path, env=slurm.env | {"PATH": path, "SBATCH_MEM_PER_NODE": "1G"})
    jobs = slurm.run("squeue", "--noheader", "--format=%A").stdout.split()
    for job in sorted(jobs):
        log = tmp_path / f"tokenize_code-{job}_0.log"
        assert slurm.wait(job, log)["JobState"] == "COMPLETED", log.read_text()
    assert len(jobs) == 2 and (tmp_path / "tokens/code/train/shard_00001.bin").is_file()
