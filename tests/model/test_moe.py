"""Tokens sorted by expert where all experts are here, beside megatron-core's way through its dispatcher."""

import pytest
import torch

from megatron_blackmamba.model.inputs import LayerInputs

from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


def values_and_gradients(mixer, hidden_SBD):
    mixer.zero_grad()
    mixer.router.tokens_E.zero_()
    leaf = hidden_SBD.clone().requires_grad_()
    out = mixer(leaf, LayerInputs(torch.zeros(4, 32, dtype=torch.long)))
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    parameters = {name: parameter.grad for name, parameter in mixer.named_parameters()}
    return {"out": out.detach(), "hidden": leaf.grad} | parameters | {"counted": mixer.router.tokens_E.clone()}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("top_k", [1, 2])
def test_sorting_gives_what_dispatching_gives(build, training, top_k):
    block = build("model.pattern=E", f"model.top_k={top_k}").decoder.layers[0]
    mixer = block.mixer.train(training)
    with torch.no_grad():
        mixer.router.weight.normal_(generator=torch.Generator().manual_seed(0))
    hidden_SBD = torch.randn(32, 4, 64, generator=torch.Generator().manual_seed(1))

    assert mixer.sorts
    sorts = values_and_gradients(mixer, hidden_SBD)
    assert sorts["counted"].sum() == 128 * top_k
    mixer.sorts = False
    through_dispatcher = values_and_gradients(mixer, hidden_SBD)
    mixer.dispatches_sorted = False
    mixer.token_dispatcher = MoEAlltoAllTokenDispatcher(
        mixer.num_local_experts, mixer.local_expert_indices, mixer.config, block.groups
    )
    as_megatron = values_and_gradients(mixer, hidden_SBD)
    for name, value in as_megatron.items():
        torch.testing.assert_close(sorts[name], value, rtol=1e-5, atol=1e-5, msg=name)
        torch.testing.assert_close(through_dispatcher[name], value, rtol=1e-5, atol=1e-5, msg=name)


def test_several_experts_a_token_are_dispatched(build):
    assert not build("model.pattern=E", "model.router.kind=softmax", "model.top_k=2").decoder.layers[0].mixer.sorts
