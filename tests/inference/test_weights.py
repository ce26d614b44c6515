"""The precision of the weights that decoding keeps in memory."""

import psutil
import pytest
import torch

from megatron_blackmamba.config import load
from megatron_blackmamba.inference import weights
from megatron_blackmamba.interchange.canonical import Canonical, Entry, shapes

CPU = torch.device("cpu")


def stored_in(dtype):
    config = load("tiny").model
    return Canonical(
        config, {name: Entry(shape, dtype, lambda: None) for name, shape in shapes(config).items()}, "here"
    )


def test_free_memory_is_what_the_system_says():
    assert weights.free_bytes(CPU) == pytest.approx(psutil.virtual_memory().available, rel=0.5)


@pytest.mark.parametrize(
    ("stored", "free_over_weights", "kept"),
    [
        (torch.float32, 2.1, torch.float32),
        (torch.float32, 1.9, torch.bfloat16),
        (torch.bfloat16, 100.0, torch.bfloat16),
    ],
)
def test_large_fp32_weights_are_kept_in_bf16(stored, free_over_weights, kept, monkeypatch):
    model = stored_in(stored)
    monkeypatch.setattr(weights, "free_bytes", lambda device: int(4 * model.parameters * free_over_weights))
    assert weights.fitting_dtype(model, CPU) == kept
