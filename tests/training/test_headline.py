"""The first lines of a job name what it trains and what may surprise."""

import pytest

from megatron_blackmamba.config import load
from megatron_blackmamba.plan.parameters import count
from megatron_blackmamba.training.start import headline

WITHOUT_GPU = "small models learn more with training.precision=fp32"


@pytest.fixture
def mixture(tmp_path):
    path = tmp_path / "mixture.yaml"
    path.write_text("sources: [{name: web, shards: tokens, validation: held_out}]")
    return f"data.mixture={path}"


def test_first_line_names_model_data_and_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load("tiny", ["training.steps=5", "folder=here"])
    first = headline.lines(config, 1, count(config))[0]
    assert first == (
        "tiny: 0.5M parameters, 0.1M of them for each token; 10,240 tokens of synthetic data;"
        f" 1 process in fp32; writes to {tmp_path}/here/tiny"
    )


def test_synthetic_data_is_pointed_out():
    assert any("data.mixture=FILE trains on text" in line for line in headline.lines(load("tiny"), 2, None))


@pytest.mark.parametrize(("every", "noted"), [(0, True), (5, False)])
def test_validation_text_that_is_never_read_is_noted(mixture, every, noted):
    said = headline.lines(load("tiny", [mixture, f"training.evaluate_every={every}"]), 2, None)
    assert any("never reads" in line for line in said) == noted
    assert mixture.partition("=")[2] in said[0]


@pytest.mark.parametrize(
    ("sources", "every", "noted"),
    [
        ("{name: a, shards: a}, {name: b, shards: b}", 5, "evaluate_every=5 measures nothing, since no source of"),
        ("{name: a, shards: a}, {name: b, shards: b, validation: c}", 5, "no validation loss of a: name shards"),
        ("{name: a, shards: a}", 0, None),
        ("{name: a, shards: a, validation: c}", 5, None),
    ],
)
def test_sources_without_validation_text_are_noted(tmp_path, sources, every, noted):
    path = tmp_path / "mixture.yaml"
    path.write_text(f"sources: [{sources}]")
    said = headline.lines(load("tiny", [f"data.mixture={path}", f"training.evaluate_every={every}"]), 2, None)
    assert [noted in line for line in said[1:]] == [True] if noted else len(said) == 1


@pytest.mark.parametrize(("gpu", "noted"), [(False, True), (True, False)])
def test_bf16_without_a_gpu_is_noted(mixture, gpu, noted, monkeypatch):
    monkeypatch.setattr(headline.device, "has_cuda", lambda: gpu)
    said = headline.lines(load("tiny", [mixture, "training.precision=bf16", "training.evaluate_every=5"]), 2, None)
    assert any(WITHOUT_GPU in line for line in said) == noted


@pytest.mark.parametrize(("has", "noted"), [(2, False), (0.4, True)])
def test_step_beyond_the_memory_is_noted(has, noted, monkeypatch):
    monkeypatch.setattr(headline.device, "has_cuda", lambda: False)
    monkeypatch.setattr(headline.fit.machine, "memory", lambda: (int(has * 2**30), 0))
    config = load("tiny", ["training.micro_batch=8"])
    said = headline.lines(config, 1, count(config))
    assert any("training.micro_batch (now 8)" in line for line in said) == noted


@pytest.mark.parametrize("here", [1, 4])
def test_weights_beyond_the_memory_are_refused(here, monkeypatch):
    monkeypatch.setattr(headline.device, "has_cuda", lambda: False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    config = load("tiny", ["parallel.expert=4"])
    one = sum(vars(headline.fit.memory.state_of(config, 4, 0))[part] for part in ("weights", "gradients", "optimizer"))
    monkeypatch.setattr(headline.fit.machine, "memory", lambda: (here * one, 0))
    headline.lines(config, 4, count(config))
    monkeypatch.setattr(headline.fit.machine, "memory", lambda: (here * one - 1, 0))
    with pytest.raises(headline.fit.TooLarge, match="does not fit: weights, gradients and optimizer state"):
        headline.lines(config, 4, count(config))


@pytest.mark.parametrize(("told", "here"), [("2(x3)", 2), ("4,2", 4), ("", 1)])
def test_slurm_says_how_many_processes_are_here(told, here, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", told)
    assert headline.fit.processes_here() == here
