"""Every tensor of a model is made on this process's device, also where megatron-core names none."""

from unittest import mock

import pytest
import torch

from megatron_blackmamba import model
from megatron_blackmamba.config import ParallelConfig, load
from megatron_blackmamba.runtime import device, world

TRANSFORMER = ["model.pattern='ME*-'", "model.mlp_hidden_size=64", "model.attention.heads=4"]


@pytest.mark.parametrize("router", ["sinkhorn", "softmax"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_tensor_is_made_elsewhere(router, precision):
    config = load("tiny", [*TRANSFORMER, f"model.router.kind={router}", f"training.precision={precision}"])
    elsewhere = torch.device("meta")  # stands for a GPU: what names no device is made on the CPU
    place = world.start(ParallelConfig())
    try:
        where = mock.patch.object(torch.cuda, "current_device", lambda: elsewhere)
        with mock.patch.object(device, "_placed", [elsewhere]), where:
            built = model.build(config, place)
    finally:
        world.shutdown()
    tensors = {**dict(built.named_parameters()), **dict(built.named_buffers())}
    assert {name: tensor.device for name, tensor in tensors.items() if tensor.device != elsewhere} == {}
