"""Quantile balancing: the bias is that of a float64 sort, moves with the weights, and balances inference's routing."""

import numpy as np
import pytest
import torch

from megatron_blackmamba import data, model
from megatron_blackmamba.config import ConfigError, load
from megatron_blackmamba.model.state_router import MEMORY
from megatron_blackmamba.routers.quantile.kind import BINS, balancing_bias, histogram_of_needs
from megatron_blackmamba.training.step.optimizer import make_trainable
from megatron_blackmamba.training.step.step import Step

RUN = ["model.router.kind=quantile", "model.pattern=ME", "data.workers=0", "data.sequence_length=32"]


def sorted_bias(scores_TE, bias_E, top_k):
    """Return the bias by sorting all needs, on numpy's float64."""
    tokens, experts = scores_TE.shape
    cutoff_T = np.sort(scores_TE + bias_E, axis=1)[:, -top_k - 1]
    needs_ET = np.sort((cutoff_T[:, None] - scores_TE).T, axis=1)
    found_E = needs_ET[:, tokens * top_k // experts - 1]
    return found_E - found_E.mean()


@pytest.mark.parametrize("top_k", [1, 3])
def test_bias_is_the_quantile_of_needs(top_k):
    draw = np.random.default_rng(top_k)
    scores_TE = 1 / (1 + np.exp(-draw.normal(size=(4096, 8)) - np.linspace(-2, 2, 8)))
    bias_E = draw.normal(size=8) * 0.1
    given = torch.from_numpy(scores_TE), torch.from_numpy(bias_E)
    found_E = balancing_bias(histogram_of_needs(*given, top_k), given[1], top_k)
    width = (2 + np.ptp(bias_E)) / BINS
    np.testing.assert_allclose(found_E, sorted_bias(scores_TE, bias_E, top_k), atol=2 * width)


@pytest.mark.parametrize("top_k", [1, 2])
def test_inference_routing_becomes_balanced(top_k):
    """New tokens of the same kind go to the experts evenly, each choosing by itself."""
    draw = torch.Generator().manual_seed(0)
    tilt_E = torch.linspace(-2, 2, 8)
    bias_E = torch.zeros(8)
    for step in range(120):
        scores_TE = (torch.randn(4096, 8, generator=draw) + tilt_E).sigmoid()
        load_E = (scores_TE + bias_E).topk(top_k, -1).indices.flatten().bincount(minlength=8)
        if step == 0:
            assert load_E.max() > 2 * load_E.double().mean()
        needs_EH = histogram_of_needs(scores_TE, bias_E, top_k)
        bias_E = MEMORY * bias_E + (1 - MEMORY) * balancing_bias(needs_EH, bias_E, top_k).float()
    assert load_E.max() <= 1.1 * load_E.double().mean()


def started(place, micro_batch):
    run = load("tiny", [*RUN, "training.global_batch=4", f"training.micro_batch={micro_batch}"])
    trainable = make_trainable(run, model.build(run, place), place)
    plan = data.build(run.data, vocab_size=512, total_samples=400)
    batches = data.BatchStream(plan.train, global_batch=4, micro_batch=micro_batch, dp_rank=0, dp_size=1, workers=0)
    trainable.optimizer.param_groups[0]["lr"] = 1e-2
    return Step(run, place, trainable, len(plan.source_names)), batches, trainable.model.decoder.layers[1].mixer.router


def test_bias_waits_for_update_and_ignores_micro_batches(place):
    found = []
    for micro_batch in (2, 4):
        step, batches, router = started(place, micro_batch)
        step.gradients(batches)
        assert router.expert_bias.eq(0).all()
        batches.again()
        step.gradients(batches)
        step.evaluate(batches)
        assert router.expert_bias.eq(0).all()
        assert step.update().applied
        found.append(router.expert_bias.clone())
    assert found[0].ne(0).any() and found[0].sum().abs() < 1e-6
    torch.testing.assert_close(found[0], found[1])
    assert router.measured()["bias_range"][0] == found[1].max() - found[1].min()


def test_all_experts_chosen_is_refused():
    with pytest.raises(ConfigError, match=r"set model\.experts above 2"):
        load("tiny", [*RUN, "model.experts=2", "model.top_k=2"])
