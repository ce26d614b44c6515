"""What a router decided, and how close the decision was."""

import torch

from megatron_blackmamba.interchange.observation import Router


def test_margin_is_the_lead_of_the_best_expert():
    for logits, choice, margin in [([1.0, 4.0], 1, 3.0), ([5.0, 1.0, 3.0], 0, 2.0), ([2.0, 2.0], None, 0.0)]:
        router = Router.of(3, torch.tensor([[logits]]))
        assert router.layer == 3
        assert choice in (None, router.choice_BS.item())
        assert router.margin_BS.item() == margin


def test_single_expert_is_never_at_a_tie():
    router = Router.of(1, torch.zeros(2, 5, 1))
    assert router.choice_BS.eq(0).all() and router.choice_BS.shape == (2, 5)
    assert router.margin_BS.isinf().all()
