"""The first lines of a job name what it trains and what may surprise."""

import pytest

from megatron_blackmamba.config import load
from megatron_blackmamba.training.start import headline

WITHOUT_GPU = "small models learn more with training.precision=fp32"


@pytest.fixture
def mixture(tmp_path):
    path = tmp_path / "mixture.yaml"
    path.write_text("sources: [{name: web, shards: tokens, validation: held_out}]")
    return f"data.mixture={path}"


def test_first_line_names_model_data_and_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = headline.lines(load("tiny", ["training.steps=5", "folder=here"]), 1, counted=True)[0]
    assert first == (
        "tiny: 0.5M parameters, 0.1M of them for each token; 10,240 tokens of synthetic data;"
        f" 1 process in fp32; writes to {tmp_path}/here/tiny"
    )


def test_synthetic_data_is_pointed_out():
    assert any("data.mixture=FILE trains on text" in line for line in headline.lines(load("tiny"), 2, counted=False))


@pytest.mark.parametrize(("every", "noted"), [(0, True), (5, False)])
def test_validation_text_that_is_never_read_is_noted(mixture, every, noted):
    said = headline.lines(load("tiny", [mixture, f"training.evaluate_every={every}"]), 2, counted=False)
    assert any("never reads" in line for line in said) == noted
    assert mixture.partition("=")[2] in said[0]


@pytest.mark.parametrize(("gpu", "noted"), [(False, True), (True, False)])
def test_bf16_without_a_gpu_is_noted(mixture, gpu, noted, monkeypatch):
    monkeypatch.setattr(headline.device, "has_cuda", lambda: gpu)
    said = headline.lines(
        load("tiny", [mixture, "training.precision=bf16", "training.evaluate_every=5"]), 2, counted=False
    )
    assert any(WITHOUT_GPU in line for line in said) == noted


@pytest.mark.parametrize(("size", "noted"), [(8, False), (10_000_000, True)])
def test_step_far_beyond_the_memory_is_noted(size, noted, monkeypatch):
    monkeypatch.setattr(headline.device, "has_cuda", lambda: False)
    batch = [f"training.global_batch={size}", f"training.micro_batch={size}"]
    said = headline.lines(load("tiny", batch), 1, counted=False)
    assert any(f"training.micro_batch (now {size})" in line for line in said) == noted
