"""Several processes write the weights of one export."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megatron_blackmamba import cli
from megatron_blackmamba.interchange import convert, hf, megatron, parallel
from megatron_blackmamba.interchange.canonical import InterchangeError
from megatron_blackmamba.interchange.open import open_model
from tests.reference.canonical import canonical
from tests.thorough import thorough


@pytest.fixture(scope="module")
def ours(silu, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    megatron.write(canonical(silu), folder / "ours")
    name = "decoder.layers.2.mixer.D"
    megatron.write(canonical(silu.with_weights(**{name: silu.weights[name] * float("nan")})), folder / "nan")
    return folder / "ours"


@thorough
def test_exports_of_one_and_several_processes_are_equal(ours, tmp_path):
    for nproc in ("1", "2"):
        words = ["export", "hf", str(ours), str(tmp_path / nproc), "--nproc", nproc, "--no-verify", "--dtype", "bf16"]
        CliRunner().invoke(cli.app, words, catch_exceptions=False)
    one, several = (hf.read(tmp_path / nproc) for nproc in ("1", "2"))
    for (name, tensor), (other, copy) in zip(one.tensors(), several.tensors(), strict=True):
        assert name == other and tensor.dtype == copy.dtype and torch.equal(tensor, copy), name
    index = json.loads((tmp_path / "2" / hf.INDEX).read_bytes())
    assert len(set(index["weight_map"].values())) >= 2 and index["metadata"]["total_size"] == one.bytes
    weights = {"model.safetensors", hf.INDEX, *index["weight_map"].values()}
    common = {path.name for path in (tmp_path / "1").iterdir()} - weights
    assert common == {path.name for path in (tmp_path / "2").iterdir()} - weights
    assert all((tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes() for name in common)


@thorough
def test_an_error_in_one_process_leaves_nothing(ours, tmp_path):
    model = megatron.read(ours.parent / "nan")
    with pytest.raises(InterchangeError, match=r"nan: decoder.layers.2.mixer.D holds NaN"):
        convert.to_hf(model, tmp_path / "out", check="none", processes=2)
    assert list(tmp_path.iterdir()) == []


def test_several_processes_export_released_files(ours, tmp_path):
    convert.to_zyphra(megatron.read(ours), tmp_path / "released", verify=False)
    convert.to_hf(open_model(tmp_path / "released"), tmp_path / "out", check="none", processes=2)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) >= 2


def die_or_go_on(pipe, source, dtype, task, threads, ema, as_native):
    """Let the process of the first file die, and the other one work for minutes if nothing ends it."""
    if "-00001-of-" in task[0][0].name:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(120)
    (Path(source) / "went_on").touch()


def test_a_killed_process_ends_the_others(ours, tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "_write", die_or_go_on)
    with pytest.raises(InterchangeError, match=r"ended with exit code -9. If memory is short, use a smaller --nproc"):
        convert.to_hf(megatron.read(ours), tmp_path / "out", check="none", processes=2)
    assert list(tmp_path.iterdir()) == [] and not (ours / "went_on").exists()
