"""The compiled router on a GPU: right, balanced, and without a word to the host."""

import pytest
import torch

from megatron_blackmamba.ops.sinkhorn import load_imbalance, sinkhorn_choice

pytestmark = pytest.mark.gpu


def trained_router_logits(tokens, experts=8, std=1.0):
    g = torch.Generator("cuda").manual_seed(0)
    normal = torch.randn(tokens + 1, experts, generator=g, device="cuda")
    return std * (normal[1:] + normal[0])


@pytest.mark.parametrize("tokens", [1, 100, 16384, 100_000])
@pytest.mark.parametrize(
    ("std", "iterations", "start"), [(1.0, 1, "balanced"), (8.0, 4, "balanced"), (2.0, 3, "uniform")]
)
def test_chooses_as_the_definition_does(tokens, std, iterations, start):
    if tokens == 1 and start == "balanced":
        pytest.skip("one token alone ties all experts")
    logits = trained_router_logits(tokens, std=std)
    exact = sinkhorn_choice(logits.double(), iterations=iterations, start=start, backend="reference")
    choice = sinkhorn_choice(logits, iterations=iterations, start=start, backend="triton")
    assert (choice == exact).float().mean() > 0.999


def test_the_host_is_never_waited_for():
    logits = trained_router_logits(16384)
    sinkhorn_choice(logits, backend="triton")  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        choice = sinkhorn_choice(logits, iterations=3, backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert load_imbalance(choice, 8) < 1.1


@pytest.mark.parametrize("std", [16.0, 90.0, 1e4])
def test_every_logit_scale_uses_several_experts(std):
    choice = sinkhorn_choice(trained_router_logits(16384, std=std), iterations=8, backend="triton")
    assert load_imbalance(choice, 8) < 4
