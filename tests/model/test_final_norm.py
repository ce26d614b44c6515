"""A kind of the last norm of one's own: its initial values, decoding, and whether it can be exported."""

import pytest
import torch

from megatron_blackmamba import norms
from megatron_blackmamba.config import ConfigError, load
from tests.model.shifted_norm import ShiftedNorm


@pytest.fixture
def key():
    norms.register(ShiftedNorm)
    yield f"model.final_norm={ShiftedNorm.name}"
    norms.unregister(ShiftedNorm.name)


@torch.no_grad()
def test_norm_begins_as_said_and_decodes_as_trained(key, build):
    norm = build(key).decoder.final_layernorm
    assert [float(getattr(norm, name).mean()) for name in ShiftedNorm.parameters] == [1, 0]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ShiftedNorm().apply(x, (norm.gain, norm.shift), norm.eps, *norm.own), norm(x))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_model_with_it_trains_in_every_precision(key, build, precision):
    model = build(key, f"training.precision={precision}")
    tokens_BS = torch.arange(32).view(2, 16) % 97
    model(tokens_BS, tokens_BS.roll(-1, 1)).float().mean().backward()
    for name in ShiftedNorm.parameters:
        parameter = getattr(model.decoder.final_layernorm, name)
        assert parameter.grad.any() and parameter.no_weight_decay


def test_a_norm_without_a_class_is_not_exported(key, monkeypatch):
    monkeypatch.setattr(ShiftedNorm, "modeling", None)
    with pytest.raises(ConfigError, match=r"have no class for model\.final_norm=shifted_norm"):
        load("tiny", [key, "checkpoint.export_every=5"])
