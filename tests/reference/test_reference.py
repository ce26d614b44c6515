"""The yardstick itself: it must be sensitive to all that it is meant to notice."""

import numpy as np
import pytest

from tests.reference import Tiny, forward, tiny

TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, 64, size=24)]


def logits(model: Tiny) -> np.ndarray:
    return forward(model.weights, model.config, TOKENS).logits_SV


@pytest.mark.parametrize(
    "options",
    [
        *({"activation": "silu"}, {"activation": "gelu"}),
        {"layers": "rsa", "mamba_norms": True, "qk_norm": True, "logit_softcap": 3.0, "embedding_multiplier": 2.0},
    ],
    ids=["silu", "gelu", "norms"],
)
def test_every_parameter_reaches_the_logits(options):
    model = tiny(**options)
    expected = logits(model)
    for name, weight in model.weights.items():
        moved = logits(model.with_weights(**{name: weight * 1.05 + 0.01}))
        assert np.abs(moved - expected).max() > 1e-4, name


def test_routing_uses_every_expert_without_near_ties():
    model = tiny()
    trace = forward(model.weights, model.config, TOKENS)
    assert all(set(routes) == {0, 1, 2, 3} for routes in trace.routes.values())
    assert min(trace.margins) > 1e-3


def test_reset_separates_documents():
    model = tiny(eod_reset=0)
    tokens = [5, 9, 17, 0, 33, 8, 2]
    alone = forward(model.weights, model.config, tokens[4:]).logits_SV
    packed = forward(model.weights, model.config, tokens).logits_SV
    np.testing.assert_array_equal(packed[4:], alone)
    running_on = forward(model.weights, {**model.config, "eod_reset": None}, tokens).logits_SV
    assert np.abs(running_on[4:] - alone).max() > 0.05
