"""Routers under watch: their own choice, and the one of training, whichever module trains them."""

import pytest
import torch

from megatron_blackmamba import routers
from megatron_blackmamba.config import load
from megatron_blackmamba.routers import Tokens
from studies.routing import Watched, information


@pytest.mark.parametrize(
    ("kind", "differs"), [("sinkhorn", True), ("sinkhorn_bias", True), ("quantile", False), ("softmax", False)]
)
@pytest.mark.parametrize("rule", ["balanced", "loss", "plain"])
def test_choice_of_training_is_told_from_tokens_own(kind, differs, rule):
    model = load("tiny", [f"model.router.kind={kind}"]).model
    liked_E = torch.linspace(-1, 1, model.experts)
    logits_TE = torch.randn(512, model.experts, generator=torch.Generator().manual_seed(0)) + liked_E
    watched = Watched(rule)
    at = Tokens(model, state={"expert_bias": -liked_E / 2})
    chosen_TK = watched.choose(routers.kind_of(kind), logits_TE, at)
    (own_TK,), (trained_TK,) = watched.own, watched.trained or watched.own
    assert bool(watched.trained) == (kind != "softmax")  # which has no other choice in training
    assert (own_TK != trained_TK).any() == differs
    expected = {"balanced": trained_TK, "loss": own_TK, "plain": logits_TE.argmax(1, keepdim=True)}
    assert torch.equal(chosen_TK, expected[rule]) and (kind != "sinkhorn_bias" or own_TK.ne(expected["plain"]).any())


def test_information_is_one_where_experts_tell_the_source():
    source_T = torch.tensor([0, 0, 1, 1])
    assert information(torch.tensor([3, 3, 5, 5]), source_T) == pytest.approx(1)
    assert information(torch.tensor([3, 5, 3, 5]), source_T) == pytest.approx(0, abs=1e-12)
