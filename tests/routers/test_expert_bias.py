"""The expert bias follows the loads, and moves only when the weights do."""

import numpy as np
import pytest
import torch

from megatron_blackmamba import data, model
from megatron_blackmamba.config import load
from megatron_blackmamba.training.step.optimizer import make_trainable
from megatron_blackmamba.training.step.step import Step
from tests.reference import routing

RATE = 0.05
RUN = ["model.router.kind=expert_bias", f"model.router.bias_update_rate={RATE}", "model.top_k=2", "data.workers=0"]
RUN += ["model.pattern=ME", "data.sequence_length=32", "training.global_batch=4", "training.micro_batch=2"]


@pytest.fixture
def started(place):
    run = load("tiny", RUN)
    trainable = make_trainable(run, model.build(run, place), place)
    plan = data.build(run.data, vocab_size=512, total_samples=400)
    batches = data.BatchStream(plan.train, global_batch=4, micro_batch=2, dp_rank=0, dp_size=1, workers=0)
    trainable.optimizer.param_groups[0]["lr"] = 1e-2
    return Step(run, place, trainable, len(plan.source_names)), batches, trainable.model.decoder.layers[1].mixer.router


def test_bias_rises_where_loads_are_small(started):
    step, batches, router = started
    expected = np.zeros(8)
    for _ in range(4):
        tokens_E = np.array(step.gradients(batches).expert_tokens[1])
        assert tokens_E.sum() == 2 * 4 * 32
        assert step.update().applied
        expected = routing.moved_bias(expected, tokens_E, RATE)
        np.testing.assert_allclose(router.expert_bias.numpy(), expected, atol=1e-6)
    assert router.measured()["bias_range"][0] == pytest.approx(np.ptp(expected), abs=1e-6)


def test_bias_waits_for_the_update(started):
    step, batches, router = started
    first = step.gradients(batches)
    assert router.expert_bias.eq(0).all()
    batches.again()
    again = step.gradients(batches)
    assert again.loss == first.loss and again.expert_tokens == first.expert_tokens
    for weight in step.model.parameters():
        weight.main_grad.fill_(torch.nan)
    assert not step.update().applied
    assert router.expert_bias.eq(0).all()
    step.gradients(batches)
    assert step.update().applied
    assert router.expert_bias.ne(0).any()


def test_validation_leaves_bias_alone(started):
    step, batches, router = started
    step.evaluate(batches)
    assert router.expert_bias.eq(0).all() and router.local_tokens_per_expert.eq(0).all()
