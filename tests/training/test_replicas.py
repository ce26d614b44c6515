"""Weights that several ranks hold are compared bit for bit."""

import socket

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.training.watch.replicas import fingerprint
from tests.thorough import thorough
from tests.training.runs import ON_TWO, SMALL, log, losses

BOTH = f"ranks 0 ({socket.gethostname()}), 1 ({socket.gethostname()})"
forked = pytest.mark.xdist_group("forks")


@given(
    st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    st.integers(1, 5000),
    st.integers(0, 2**40),
    st.integers(0, 2**10),
)
def test_any_flipped_bit_changes_the_fingerprint(dtype, size, place, bit):
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    y = x.clone()
    width = x.element_size() * 8
    bits = y.view({16: torch.int16, 32: torch.int32, 64: torch.int64}[width])
    bits[place % size] ^= torch.tensor(1, dtype=bits.dtype) << bit % width
    assert fingerprint(x) == fingerprint(x.clone()) != fingerprint(y)


def test_exchanged_rows_change_the_fingerprint():
    x = torch.randn(4, 1024)
    assert fingerprint(x) != fingerprint(x[[1, 0, 2, 3]])


@forked
@pytest.mark.parametrize(
    "fault, layout, name",
    [
        ("FlippedNorm", "parallel.expert=2", "decoder.layers.2.norm.weight"),
        ("FlippedExpert", "parallel.expert=1", "decoder.layers.1.mixer.experts.fc1"),
        ("FlippedRouter", "parallel.tensor=2", "decoder.layers.3.mixer.router.weight"),
    ],
)
def test_flipped_bit_in_one_replica_stops_run(forks, tmp_path, fault, layout, name):
    job = forks.run(tmp_path, [*SMALL, layout, "training.guard.replicas_every=1"], trainer=fault)
    assert job.wait() == [65, 65], job.output()
    assert f"step 13: replicas of weights differ: {BOTH} in {name}; stop" in log(tmp_path)
    assert not RunFolder(tmp_path / "run").checkpoint(13).exists()


@thorough
@forked
def test_rewinding_from_flipped_bit_trains_same_samples_again(forks, tmp_path, undisturbed):
    rewinding = ["training.guard.replicas_every=1", "training.guard.spike=rewind"]
    job = forks.run(tmp_path, [*ON_TWO, *rewinding], trainer="FlippedNorm")
    assert job.wait() == [0, 0], job.output()
    assert "rewound to step 10\n" in log(tmp_path)
    assert losses(tmp_path) == undisturbed


@forked
def test_replicas_that_differ_are_never_saved(forks, tmp_path):
    """Without a sharded optimizer a flipped bit stays: the save at step 14 sees it before the comparison at 15."""
    settings = ["optimizer.distributed=false", "training.guard.replicas_every=15", "checkpoint.every=14"]
    job = forks.run(tmp_path, [*ON_TWO, *settings], trainer="FlippedNorm")
    assert job.wait() == [65, 65], job.output()
    assert "replicas of weights differ" in log(tmp_path) and "step 15: replicas of weights differ" in log(tmp_path)
    assert not list(RunFolder(tmp_path / "run").checkpoints.glob("step_*"))
