"""The routing of tokens to experts in training and inference."""

import pytest
import torch

from megatron_blackmamba.ops.sinkhorn import load_imbalance, sinkhorn_choice


@pytest.fixture
def router(build):
    router = build("model.pattern=E").decoder.layers[0].mixer.router
    with torch.no_grad():
        router.weight.normal_(generator=torch.Generator().manual_seed(0))
        router.bias.copy_(torch.linspace(-2, 2, 8))  # some experts are liked by everyone
    return router


@pytest.fixture
def hidden_SBD():
    return torch.randn(64, 4, 64, generator=torch.Generator().manual_seed(1)) / 8


def expert_of(chosen_TE):
    assert (chosen_TE.sum(dim=1) == 1).all()
    return chosen_TE.int().argmax(dim=1)


def test_in_training_sinkhorn_chooses_and_balances(router, hidden_SBD):
    logits = router.gating(hidden_SBD).flatten(0, 1)
    _, chosen = router.train()(hidden_SBD).as_map()
    assert torch.equal(expert_of(chosen), sinkhorn_choice(logits))
    assert load_imbalance(expert_of(chosen), 8) < 1.3 < load_imbalance(logits.argmax(1), 8)


def test_in_use_the_largest_logit_chooses(router, hidden_SBD):
    _, chosen = router.eval()(hidden_SBD).as_map()
    assert torch.equal(expert_of(chosen), router.gating(hidden_SBD).flatten(0, 1).argmax(1))


@pytest.mark.parametrize("training", [True, False])
def test_chosen_expert_is_weighted_by_its_sigmoid(router, hidden_SBD, training):
    weights, chosen = router.train(training)(hidden_SBD).as_map()
    logits = hidden_SBD.flatten(0, 1) @ router.weight.t() + router.bias
    assert torch.allclose(weights[chosen], 1 / (1 + torch.exp(-logits[chosen])), atol=1e-6)
    assert (weights[~chosen] == 0).all()


def test_only_the_chosen_weight_carries_gradient(router, hidden_SBD):
    weights, chosen = router.train()(hidden_SBD).as_map()
    router.zero_grad()
    weights.sum().backward()
    probability = weights.detach()[chosen]
    expected = torch.zeros(8).index_add_(0, expert_of(chosen), probability * (1 - probability))
    assert torch.allclose(router.bias.grad, expected, atol=1e-5)


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


def test_the_softmax_router_is_there_for_ablations(build):
    model = build("model.router.kind=softmax", "model.top_k=2").train()
    tokens = torch.randint(0, 512, (2, 32))
    model(tokens, tokens).mean().backward()
    assert model.take_expert_tokens().sum(dim=1).tolist() == [0, 128, 0, 128]
    assert all(block.mixer.router.bias.grad is not None for block in list(model.decoder.layers)[1::2])
