"""How many processes make the shards, and what they tell about their progress."""

import multiprocessing
import os

import pytest

from megatron_blackmamba.data_tools import workers
from megatron_blackmamba.data_tools.shard_writer import write_shard
from megatron_blackmamba.data_tools.tokenization import TokenizeOptions, plan
from megatron_blackmamba.data_tools.workers import make_shards


@pytest.fixture
def jobs(write_jsonl, tmp_path, tokenizer_file):
    """Three shards of one raw file each."""
    paths = [str(write_jsonl(f"{i}.jsonl", [f"document {n} " * 50 for n in range(200)])) for i in range(3)]
    return plan(paths, tmp_path / "out", TokenizeOptions(tokenizer=str(tokenizer_file), shard_size="1")).jobs


@pytest.mark.parametrize(
    "worth, cores, processes, threads",
    [(1, 2, 2, 1), (1, 8, 3, 2), (1, 1, None, None), (1 << 30, 8, None, None)],
)
def test_cores_are_shared_by_processes(worth, cores, processes, threads, jobs, tokenizer, monkeypatch):
    crews = []

    class Crew:
        def __init__(self, task, processes, threads):
            crews.append((processes, threads))

        def make(self, jobs):
            return []

    monkeypatch.setattr(workers, "BYTES_WORTH_A_PROCESS", worth)
    monkeypatch.setattr(workers, "_Crew", Crew)
    made = make_shards(jobs, tokenizer, cores=cores, quiet=True)
    assert crews == ([] if processes is None else [(processes, threads)])
    assert len(made) == (3 if processes is None else 0)


def test_workers_limit_the_threads_of_both_libraries(monkeypatch):
    for name in ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS"):
        monkeypatch.setenv(name, "64")
    monkeypatch.setattr(workers.signal, "signal", lambda *_: None)
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    workers._serve(theirs, None, 3)  # ends at once, since nobody sends it a shard
    assert os.environ["RAYON_NUM_THREADS"] == os.environ["FASTOKENS_BPE_THREADS"] == "3"


def test_progress_grows_to_the_size_of_the_input(jobs, tokenizer):
    told = []
    manifest = write_shard(jobs[0], tokenizer, lambda *counts: told.append(counts))
    assert told == sorted(told)
    assert told[-1] == (jobs[0].input_bytes, manifest.tokens, manifest.documents)
