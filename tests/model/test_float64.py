"""Training in float64: nothing on the way from the weights to the update rounds to fp32."""

import pytest
import torch

from megatron_blackmamba import model
from megatron_blackmamba.config import load
from megatron_blackmamba.runtime import device

FP64 = "training.precision=fp64"
TOKENS_BS = torch.arange(40).view(2, 20)


@pytest.mark.parametrize("pattern", ["MEME", "*-*E", "SE"])
def test_float64_model_is_float64_throughout(build, pattern):
    built = build(FP64, f"model.pattern='{pattern}'", "model.mlp_hidden_size=96", "model.attention.heads=4")
    seen = []
    for module in set(built.modules()) - {built.rotary}:  # its fp32 angles do not depend on the layout
        module.register_forward_hook(lambda _, inputs, output: seen.extend(dtypes((inputs, output))))
    losses = built(TOKENS_BS, TOKENS_BS.roll(-1, 1))
    losses.mean().backward()
    assert losses.dtype is torch.float64
    assert {p.dtype for p in built.parameters()} == {p.grad.dtype for p in built.parameters()} == {torch.float64}
    assert set(seen) <= {torch.float64, torch.int64, torch.bool}


def dtypes(value):
    if isinstance(value, torch.Tensor):
        return [value.dtype]
    return [dtype for item in value for dtype in dtypes(item)] if isinstance(value, (tuple, list)) else []


def test_float64_starts_from_the_fp32_weights(build):
    single, double = build(), build(FP64)
    for (name, weight), (_, wide) in zip(single.named_parameters(), double.named_parameters(), strict=True):
        assert torch.equal(weight.double(), wide), name


def test_float64_is_refused_on_a_gpu(place):
    with (
        device.placed_on(torch.device("cuda")),
        pytest.raises(device.DeviceError, match=r"fp64 runs on CPUs only.*CUDA_VISIBLE_DEVICES="),
    ):
        model.build(load("tiny", [FP64]), place)
