"""A kind of the last norm of one's own: its initial values, decoding, and whether it can be exported."""

import pytest
import torch

from megatron_blackmamba import norms
from megatron_blackmamba.config import ConfigError, load
from tests.model.shifted_norm import ShiftedNorm


class Module(torch.nn.Module):
    """The same norm for training."""

    def __init__(self, config, hidden_size, eps):
        super().__init__()
        self.eps = eps
        for name in ShiftedNorm.parameters:  # the run's initial values replace these
            setattr(self, name, torch.nn.Parameter(torch.full((hidden_size,), 7.0, dtype=config.params_dtype)))

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight + self.shift


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
    torch.testing.assert_close(ShiftedNorm().apply(x, (norm.weight, norm.shift), norm.eps), norm(x))


def test_a_norm_without_a_class_is_not_exported(key):
    with pytest.raises(ConfigError, match="have no class for shifted_norm"):
        load("tiny", [key, "checkpoint.export_every=5"])
