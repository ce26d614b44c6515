"""Recomputation trades memory for time and changes nothing else."""

import pytest
import torch

TOKENS = torch.randint(0, 512, (2, 128), generator=torch.Generator().manual_seed(0))


def kept_and_gradients(model):
    """Bytes of distinct storages kept for the backward pass (weights aside), and the gradients."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.train()(TOKENS, TOKENS.roll(-1, 1)).mean()
    kept_bytes = sum(kept.values())
    loss.backward()
    return kept_bytes, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def plain(build):
    return kept_and_gradients(build())


@pytest.mark.parametrize("what, part", [("experts", 0.9), ("layers", 0.5)])
def test_recomputing_keeps_less_and_gives_the_same_gradients(build, plain, what, part):
    kept, gradients = kept_and_gradients(build(f"training.recompute={what}"))
    assert kept < part * plain[0]
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, plain[1][name], atol=1e-7), name
