"""The bias of Sinkhorn's plan outlives training: inference then chooses as training did."""

import pytest
import torch

from megatron_blackmamba.model.state_router import MEMORY
from megatron_blackmamba.ops.sinkhorn import load_imbalance, sinkhorn_choice


@pytest.fixture
def router(build):
    model = build("model.pattern=E", "model.experts=8", "model.router.kind=sinkhorn_bias")
    router = model.decoder.layers[0].mixer.router
    with torch.no_grad():
        router.weight.normal_(generator=torch.Generator().manual_seed(1))
        router.bias.copy_(torch.linspace(-1, 1, 8))
    return router


def hidden(seed):
    return torch.randn(64, 8, 64, generator=torch.Generator().manual_seed(seed)) / 8


def test_inference_chooses_as_training_did(router):
    for step in range(30):
        router.train().begin_batch()
        router(hidden(step))
        router.end_batch()
    new = hidden(99)
    balanced, alone = router(new).chosen, router.eval()(new).chosen
    plain = router.gating(new).flatten(0, 1).argmax(1, keepdim=True)
    assert (alone == balanced).float().mean() > 0.95 > 0.8 > (plain == balanced).float().mean()
    assert load_imbalance(alone, 8) < 1.3 < 2 < load_imbalance(plain, 8)


def test_bias_is_the_mean_over_micro_batches(router):
    expected = torch.zeros(8)
    router.train().begin_batch()
    for seed in (1, 2):
        logits_TE = router.gating(hidden(seed)).flatten(0, 1).detach()
        sinkhorn_choice(logits_TE, bias_E=expected)
        router(hidden(seed))
        assert router.expert_bias.eq(0).all()
    router.eval()(hidden(3))
    router.end_batch()
    torch.testing.assert_close(router.expert_bias, (1 - MEMORY) * expected / 2)
    router.end_batch()  # without a micro-batch it says nothing of the experts
    assert router.measured()["bias_range"][0] > 0
