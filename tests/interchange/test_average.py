"""The mean of checkpoints, against numpy in float64; and what has no mean is refused."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from megatron_blackmamba import cli
from megatron_blackmamba.interchange import megatron
from megatron_blackmamba.interchange.average import average
from megatron_blackmamba.interchange.canonical import InterchangeError, in_memory, shapes
from megatron_blackmamba.interchange.open import open_model
from tests.reference import tiny
from tests.reference.canonical import canonical


def other(model, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    weights = {name: (w + torch.randn(w.shape, generator=generator) * 0.1).to(dtype) for name, w in model.tensors()}
    return in_memory(model.config, weights, f"number {seed}")


@pytest.mark.parametrize("weights", [None, [1, 0, 3]])
def test_mean_is_that_of_float64(weights):
    models = [other(canonical(tiny("silu")), seed, torch.float32) for seed in range(3)]
    shares = np.array(weights or [1, 1, 1]) / sum(weights or [1, 1, 1])
    for name, found in average(models, weights).tensors():
        arrays = [model.entries[name].load().double().numpy() for model in models]
        expected = sum(share * array for share, array in zip(shares, arrays, strict=True))
        assert np.allclose(found.numpy(), expected, rtol=2**-23, atol=0), name  # one rounding, to fp32


def test_bf16_checkpoints_have_a_mean_in_fp32():
    """A mean rounded to bf16 would lose what averaging gives: here the two differ by less than a step of bf16."""
    one = canonical(tiny("silu"))
    low, high = (in_memory(one.config, {n: (w * f).bfloat16() for n, w in one.tensors()}) for f in (1, 1.005))
    mean = average([low, high])
    assert mean.dtype == torch.float32
    name = "embedding.word_embeddings.weight"
    assert (mean.entries[name].load() != mean.entries[name].load().bfloat16()).any()


def test_command_writes_a_checkpoint_that_opens(tmp_path):
    models = [other(canonical(tiny("silu")), seed, torch.float32) for seed in range(2)]
    for number, model in enumerate(models):
        megatron.write(model, tmp_path / str(number))
    out = tmp_path / "mean"
    words = ["average", *(str(tmp_path / name) for name in ("0", "1", "mean")), "--json"]
    told = json.loads(CliRunner().invoke(cli.app, words, catch_exceptions=False).stdout)
    assert told["parity"]["same_top1"] == told["parity"]["tokens"] > 0
    expected = average(models)
    for name, tensor in open_model(out).tensors():
        assert torch.equal(tensor, expected.entries[name].load()), name


def random_weights(config):
    return {name: torch.randn(shape) for name, shape in shapes(config).items()}


def test_what_has_no_mean_is_refused(tmp_path):
    silu, gelu = canonical(tiny("silu")), canonical(tiny("gelu"))
    with pytest.raises(InterchangeError, match=r"has other model\.activation than"):
        average([silu, gelu])
    with pytest.raises(InterchangeError, match="has other parameters than"):
        average([silu, in_memory(wider := silu.config.model_copy(update={"expand": 3}), random_weights(wider))])
    with pytest.raises(InterchangeError, match="3 weights for 2 checkpoints"):
        average([silu, silu], [1, 2, 3])
    with pytest.raises(InterchangeError, match="none may be negative"):
        average([silu, silu], [1, -1])
    with pytest.raises(InterchangeError, match="at least two"):
        average([silu])
