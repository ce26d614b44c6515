"""Every router against its paper in float64: choice, weights and gradients, in training and inference."""

import numpy as np
import pytest
import torch

from megatron_blackmamba.routers import Use
from tests.reference import routing

from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

RATE = 0.25
BIAS_E = np.linspace(0.3, -0.3, 8)
CASES = {
    "sinkhorn": (1, "sigmoid", False),
    "sinkhorn_2": (2, "sigmoid", False),
    "sinkhorn_bias": (1, "sigmoid", False),
    "sinkhorn_crossed": (1, "softmax", False),
    "softmax_crossed": (1, "sigmoid", False),
    "softmax_crossed_2": (2, "sigmoid", True),
    "softmax": (1, "softmax", False),
    "softmax_2": (2, "softmax", False),
    "expert_bias": (1, "sigmoid", False),
    "expert_bias_3": (3, "sigmoid", True),
    "expert_choice": (1, "softmax", False),
    "expert_choice_2": (2, "softmax", False),
}


def kind_of(name):
    return name.rstrip("_123").removesuffix("_crossed")


@pytest.fixture(params=CASES)
def case(request, build):
    top_k, *how = CASES[request.param]
    kind = kind_of(request.param)
    settings = [f"model.router.aux_loss={RATE}"] if kind == "softmax" else []
    settings += [f"model.router.gate={how[0]}"] if "crossed" in request.param else []
    router = build(
        "model.pattern=E", "training.precision=fp64", f"model.router.kind={kind}", f"model.top_k={top_k}", *settings
    )
    router = router.decoder.layers[0].mixer.router
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        router.weight.normal_(generator=random)
        router.bias.copy_(torch.linspace(-1, 1, 8))  # some experts are liked by everyone
        if kind in ("expert_bias", "sinkhorn_bias"):
            router.expert_bias.copy_(torch.from_numpy(BIAS_E))
    return kind, top_k, how, router, torch.randn(6, 4, 64, generator=random, dtype=torch.float64) / 8


def chosen_by(kind, logits_TE, top_k, training):
    if kind in ("sinkhorn", "sinkhorn_bias") and training:
        return routing.sinkhorn(logits_TE, top_k)
    if kind == "expert_choice" and training:
        return routing.expert_choice(logits_TE, top_k)
    if kind == "expert_bias":
        return routing.largest(routing.sigmoid(logits_TE) + BIAS_E.astype(np.float32), top_k)
    if kind == "sinkhorn_bias":
        return routing.largest(logits_TE + BIAS_E.astype(np.float32), top_k)
    return routing.largest(logits_TE, top_k)


@pytest.mark.parametrize("training", [True, False])
def test_choice_and_weights_match_the_paper(case, training):
    kind, top_k, how, router, hidden_SBD = case
    logits_TE = router.gating(hidden_SBD).flatten(0, 1).detach().numpy()
    weights_TE, chosen_TE = router.train(training)(hidden_SBD).as_map()
    expected = chosen_by(kind, logits_TE, top_k, training)
    np.testing.assert_array_equal(chosen_TE.numpy(), expected)
    np.testing.assert_allclose(weights_TE.detach().numpy(), routing.weights(logits_TE, expected, *how), atol=1e-14)
    np.testing.assert_array_equal(router.tokens_E.numpy(), expected.sum(0))


def test_gradients_match_central_differences(case):
    kind, top_k, how, router, hidden_SBD = case
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    pull_TE = np.random.default_rng(0).normal(size=(24, 8))
    hidden_SBD = hidden_SBD.clone().requires_grad_()
    weights_TE, _ = router.train()(hidden_SBD).as_map()
    (weights_TE * torch.from_numpy(pull_TE)).sum().backward()

    logits_TE = router.gating(hidden_SBD).flatten(0, 1).detach().numpy()
    chosen_TE = chosen_by(kind, logits_TE, top_k, training=True)

    def loss(logits_TE):
        total = float((routing.weights(logits_TE, chosen_TE, *how) * pull_TE).sum())
        return total + (routing.auxiliary_loss(logits_TE, chosen_TE, RATE, how[0]) if kind == "softmax" else 0.0)

    gradient_TE = routing.gradient(loss, logits_TE)
    hidden_TD = hidden_SBD.detach().flatten(0, 1).numpy()
    close = {"atol": 1e-8, "rtol": 1e-7}
    np.testing.assert_allclose(router.weight.grad.numpy(), gradient_TE.T @ hidden_TD, **close)
    np.testing.assert_allclose(router.bias.grad.numpy(), gradient_TE.sum(0), **close)
    np.testing.assert_allclose(
        hidden_SBD.grad.flatten(0, 1).numpy(), gradient_TE @ router.weight.detach().numpy(), **close
    )


def test_only_balanced_choices_see_later_tokens(case):
    kind, _, _, router, hidden_SBD = case
    later_SBD = hidden_SBD.clone()
    later_SBD[3:] = later_SBD[3:].flip(0) * 4

    def same(training):
        router.train(training)
        return torch.equal(router(hidden_SBD).chosen[:12], router(later_SBD).chosen[:12])

    assert same(training=False)
    assert same(training=True) == (kind in ("softmax", "expert_bias"))


def test_evaluation_is_what_decoding_and_exports_do(case):
    _, top_k, _, router, hidden_SBD = case
    weights_TE, chosen_TE = router.eval()(hidden_SBD).as_map()
    logits_TE = router.gating(hidden_SBD).flatten(0, 1)
    choice_TK = router.use.choice(logits_TE, top_k, getattr(router, "expert_bias", None))
    assert chosen_TE.gather(1, choice_TK).all() and chosen_TE.sum() == choice_TK.numel()
    torch.testing.assert_close(weights_TE.gather(1, choice_TK), router.use.weights(logits_TE, choice_TK))


@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
def test_token_without_expert_has_zero_weights_and_gradients(scores):
    use = Use(scores, normalized=True)
    logits_TE = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    chosen_TE = torch.tensor([[True, False, True], [False, False, False]])
    weights_TE = use.weight_map(logits_TE, chosen_TE)
    (weights_TE * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert weights_TE.sum(1).tolist() == pytest.approx([1.0, 0.0])
    assert logits_TE.grad.isfinite().all() and logits_TE.grad[1].eq(0).all() and logits_TE.grad[0].ne(0).any()


def test_scores_that_underflow_give_zero_weights():
    logits_TE = torch.full((1, 3), -200.0, requires_grad=True)
    weights_TK = Use("sigmoid", normalized=True).weights(logits_TE, torch.tensor([[0, 2]]))
    weights_TK.sum().backward()
    assert weights_TK.tolist() == [[0.0, 0.0]] and logits_TE.grad.isfinite().all()


def test_a_biased_choice_needs_the_bias():
    logits_TE = torch.tensor([[1.0, 2.0, 3.0]])
    use = Use("sigmoid", biased=True)
    assert use.selecting(logits_TE, torch.tensor([9.0, 0.0, 0.0])).argmax() == 0
    with pytest.raises(TypeError, match="needs the bias of each expert"):
        use.selecting(logits_TE)
