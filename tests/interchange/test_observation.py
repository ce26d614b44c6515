"""The decisions of a router, and their margins."""

import torch

from megatron_blackmamba.interchange.observation import Router


def test_margin_is_the_lead_of_the_best_expert():
    for logits, choice, margin in [([1.0, 4.0], 1, 3.0), ([5.0, 1.0, 3.0], 0, 2.0), ([2.0, 2.0], None, 0.0)]:
        router = Router.of(3, torch.tensor([[logits]]), top_k=1)
        assert router.layer == 3
        assert choice in (None, router.choice_BSK.item())
        assert router.margin_BS.item() == margin


def test_several_experts_tie_with_the_first_left_out():
    router = Router.of(1, torch.tensor([[[5.0, 1.0, 3.0, 2.5]]]), top_k=2)
    assert router.choice_BSK.tolist() == [[[0, 2]]]
    assert router.margin_BS.item() == 0.5
    assert Router.of(1, torch.zeros(1, 1, 2), top_k=2).margin_BS.isinf().all()  # all are chosen


def test_single_expert_is_never_at_a_tie():
    router = Router.of(1, torch.zeros(2, 5, 1), top_k=1)
    assert router.choice_BSK.eq(0).all() and router.choice_BSK.shape == (2, 5, 1)
    assert router.margin_BS.isinf().all()
