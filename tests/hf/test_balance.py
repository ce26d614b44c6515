"""Fine-tuning with balance: in training the modeling files route as pretraining does."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from megatron_blackmamba import model as models
from megatron_blackmamba.config import ParallelConfig, load
from megatron_blackmamba.hf.configuration_blackmamba import BlackMambaConfig
from megatron_blackmamba.hf.functions_blackmamba import sinkhorn
from megatron_blackmamba.hf.modeling_blackmamba import BlackMambaForCausalLM
from megatron_blackmamba.ops.sinkhorn import sinkhorn_choice
from megatron_blackmamba.runtime import world
from tests.model.test_forward import as_overrides, load_released


@pytest.fixture(scope="module")
def place():
    yield world.start(ParallelConfig())
    world.shutdown()


@pytest.mark.parametrize("top_k, iterations, start", [(1, 1, "balanced"), (2, 7, "balanced"), (1, 3, "uniform")])
def test_plan_chooses_as_in_pretraining(top_k, iterations, start):
    logits_TE = 3 * torch.randn(500, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options = {"iterations": iterations, "temperature": 1.5, "start": start}
    expected = sinkhorn_choice(logits_TE, top_k=top_k, backend="reference", **options).view(500, top_k)
    chosen = sinkhorn(logits_TE, **options).topk(top_k).indices
    assert torch.equal(chosen.sort().values, expected.sort().values)


def test_training_loss_is_that_of_pretraining(place, export, silu):
    ours = models.build(load("tiny", [*as_overrides(silu.config), "training.precision=fp64"]), place)
    load_released(ours, silu.weights).train()
    folder = export(silu)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, kernels="torch", balance_in_training=True
    ).double()
    tokens = torch.randint(1, 64, (3, 40), generator=torch.Generator().manual_seed(2))
    expected = ours(tokens, tokens.roll(-1, 1))[:, :-1].mean().item()
    losses = []
    for mode in (True, False):
        logits_BLV = theirs.train(mode)(tokens).logits  # the loss of transformers itself rounds to fp32
        losses.append(F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item())
    assert losses[0] == pytest.approx(expected, abs=1e-10)
    assert abs(losses[1] - expected) > 1e-3


def test_balance_is_refused_for_other_routers():
    with pytest.raises(ValueError, match="trained with Sinkhorn"):
        BlackMambaConfig(router_kind="softmax", balance_in_training=True)
    config = BlackMambaConfig(num_layers=1, hidden_size=32, router_kind="softmax")
    config.balance_in_training = True  # as from_pretrained does
    with pytest.raises(ValueError, match="trained with Sinkhorn"):
        BlackMambaForCausalLM(config)
