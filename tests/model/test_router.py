"""The routing of tokens to experts in training and inference."""

import pytest
import torch


@pytest.fixture
def hidden_SBD():
    return torch.randn(64, 4, 64, generator=torch.Generator().manual_seed(1)) / 8


def test_logits_are_fp32_though_the_model_is_bf16(build, hidden_SBD):
    router = build("model.pattern=E", "training.precision=bf16").decoder.layers[0].mixer.router
    assert router.gating(hidden_SBD.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("recompute", ["none", "experts", "layers"])
def test_recomputed_tokens_are_counted_once(build, recompute):
    model = build(f"training.recompute={recompute}").train()
    tokens = torch.randint(0, 512, (2, 32))
    for _ in range(2):  # two micro-batches of a step
        model(tokens, tokens).mean().backward()
    counted = model.take_expert_tokens()
    assert counted.sum(dim=1).tolist() == [0, 128, 0, 128]
    assert model.take_expert_tokens().sum() == 0
