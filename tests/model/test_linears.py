"""The linears that a config chooses."""

import importlib.util

import pytest

from megatron_blackmamba.config import ConfigError
from megatron_blackmamba.model import linears
from megatron_blackmamba.ops import fp8


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is installed"
)
def test_missing_transformer_engine_is_named():
    with pytest.raises(ConfigError, match=r"kernels\.linear=te needs Transformer Engine"):
        linears.linears("te")


def test_a_gpu_without_fp8_is_named(monkeypatch):
    monkeypatch.setattr(fp8.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fp8.torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(fp8.torch.cuda, "get_device_name", lambda: "A100")
    with pytest.raises(ConfigError, match=r"need an H100 or a newer GPU; here is A100\. Use kernels.linear=local"):
        linears.linears("fp8")
