"""Runs whose token shards are changed before or during training: they stop, and name the shard on every rank."""

import os
import re

import pytest

from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.formats.shards import Shard
from tests.data.corpus import write_mixture, write_shard
from tests.training.runs import SMALL, log, metrics
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("forks")


@pytest.fixture
def mixture(tmp_path):
    """Overrides of a run that would train for hours on two shards and validate on a third."""
    for number, name in enumerate(("train/one", "train/two", "held_out")):
        write_shard(tmp_path / name, 150 * number, 150, vocab=512)
    write_mixture(tmp_path, [{"name": "a", "shards": "train", "validation": "held_out"}])
    return [
        *(*SMALL, "data.kind=mixture", f"data.mixture={tmp_path}/mixture.yaml", "data.sequence_length=16"),
        *("training.tokens=100000000", "parallel.expert=2"),
    ]


def test_changed_while_training_both_ranks_stop(forks, tmp_path, mixture):
    job = forks.run(tmp_path, mixture, trainer="Watchful")
    run = RunFolder(tmp_path / "run")
    wait_until(lambda: run.log.exists() and "all shards match their manifests (3)" in log(tmp_path), job)
    trained = len(metrics(tmp_path))
    wait_until(lambda: len(metrics(tmp_path)) > trained + 3, job)
    shard = Shard.open(tmp_path / "train/two")
    with open(shard.bin_path, "r+b") as file:  # in place: a file that is cut, even for a moment, is another fault
        file.seek(300)
        byte = file.read(1)[0]
        file.seek(300)
        file.write(bytes([byte ^ 1]))
    assert job.wait() == [1, 1], job.output()
    for rank in (0, 1):
        assert f"{shard.bin_path}: its sha256 is" in (tmp_path / f"output_{rank}").read_text()
    assert "fails after step" in log(tmp_path) and str(shard.bin_path) in log(tmp_path)


def test_a_replaced_validation_shard_stops_the_run(forks, tmp_path, mixture):
    write_shard(tmp_path / "other", 360, 150, vocab=512)
    (tmp_path / "other.bin").replace(tmp_path / "held_out.bin")
    job = forks.run(tmp_path, mixture)
    assert job.wait() == [1, 1], job.output()
    assert job.output().count(f"{tmp_path}/held_out.bin: its sha256 is") == 2  # of each rank
    assert not RunFolder(tmp_path / "run").latest.exists()


def test_id_outside_vocabulary_names_rank_and_place(forks, tmp_path, mixture):
    shard = Shard.open(tmp_path / "train/one")
    tokens = shard.token_ids[:]
    tokens[77] = 512
    shard.bin_path.write_bytes(tokens.tobytes())
    job = forks.run(tmp_path, [*mixture, "data.verify_rate=0"])
    assert 1 in job.wait(), job.output()
    assert "rank " in job.output()
    assert f"{shard.bin_path}: token 77 (document 2; position" in job.output()


def test_a_shard_cut_while_training_is_named(forks, tmp_path, mixture):
    """A mapped file would kill the rank with SIGBUS."""
    job = forks.run(tmp_path, [*mixture, "data.verify_rate=0"])
    wait_until(lambda: len(metrics(tmp_path)) > 3, job)
    shard = Shard.open(tmp_path / "train/two")
    os.truncate(shard.bin_path, 301)
    codes = job.wait()
    assert set(codes) == {1}, job.output()  # not 135
    message = f"{shard.bin_path}: ends after 301 bytes, its manifest says 600"
    by_rank = [
        [line for line in (tmp_path / f"output_{rank}").read_text().splitlines() if message in line] for rank in (0, 1)
    ]
    assert sorted(map(len, by_rank)) in ([0, 1], [1, 1])  # both ranks may read it in one step
    assert all(re.search(r"sample \d+: ", line) and "data verify" in line for lines in by_rank for line in lines)
