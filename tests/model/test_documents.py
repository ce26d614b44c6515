"""Under model.eod_reset the documents of a sequence do not see each other in training, by exactly 0."""

import pytest
import torch

from megatron_blackmamba import model
from megatron_blackmamba.config import load
from tests.model.conftest import place

__all__ = ["place"]
EOD, FIRST, OTHER, SECOND = 7, [3, 9, 4, 11], [20, 1, 1, 8], [5, 30, 2, 6, 12, 40]
SMALL = ["model.pattern=M*R-SG", "training.precision=fp64", "model.hidden_size=32", "model.vocab_size=64"]
SMALL += [
    "model.delta.head_dim=16",
    "model.delta.key_dim=8",
    "model.mamba2.head_dim=16",
    "model.mamba3.head_dim=16",
    "model.attention.heads=4",
    "model.mlp_hidden_size=40",
]
SMALL += [f"model.eod_reset={EOD}"]


@pytest.mark.parametrize(("across", "rank"), [(False, 1), (False, 3), (True, 1)])
def test_a_change_to_one_document_leaves_the_others(across, rank, place):
    rules = [f"model.attention.across_documents={str(across).lower()}", f"model.mamba3.rank={rank}"]
    run = load("tiny", [*SMALL, *rules])
    network = model.build(run, place)
    embedded, losses = [], []
    with network.embedding.register_forward_hook(lambda *call: embedded.append(call[2])):
        for first in (FIRST, OTHER):
            tokens = torch.tensor([[*first, EOD, *SECOND]])
            losses.append(network(tokens, tokens.roll(-1, 1))[0, len(first) + 1 : -1])
    (gradient,) = torch.autograd.grad(losses[1].sum(), embedded[1])
    assert torch.equal(*losses) is not across
    assert bool((gradient[: len(FIRST) + 1] == 0).all()) is not across
    assert bool((gradient[len(FIRST) + 1 :] != 0).any())


EXACT, ROUNDING = 0.0, 2e-15
LAYERS = {"MM": EXACT, "**": EXACT, "--": EXACT, "SS": ROUNDING, "RR": ROUNDING, "GG": ROUNDING}
ROUTERS = dict.fromkeys(("hash", "softmax", "quantile", "expert_bias", "zaya"), ROUNDING)
CASES = {**{f'model.pattern="{layers}"': most for layers, most in LAYERS.items()}}
CASES |= {f"model.pattern=EE model.router.kind={kind}": most for kind, most in ROUTERS.items()}


def change(place, words, first, second):
    """Return by how much the losses of a second document change with the tokens of the first one, at most."""
    network = model.build(load("tiny", [*SMALL, "model.experts=4", *words]), place)
    random = torch.Generator().manual_seed(first)
    text = torch.randint(8, 64, (second,), generator=random)
    losses = []
    for _ in range(4):
        tokens = torch.cat([torch.randint(8, 64, (first,), generator=random), torch.tensor([EOD]), text])[None]
        losses.append(network(tokens, tokens.roll(-1, 1))[0, first + 1 : -1].detach())
    return max((loss - losses[0]).abs().max().item() for loss in losses)


@pytest.mark.parametrize("words", CASES)
def test_documents_change_each_other_by_rounding_alone(words, place):
    for lengths in ((5, 6), (40, 40), (300, 300)):
        exact = lengths != (300, 300) and "EE" not in words
        assert change(place, words.split(), *lengths) <= (EXACT if exact else CASES[words]), lengths


@pytest.mark.parametrize("kind", ["sinkhorn", "sinkhorn_bias", "expert_choice"])
def test_balancing_routers_choose_for_all_documents_together(kind, place):
    assert change(place, ["model.pattern=EE", f"model.router.kind={kind}"], 40, 40) > 1e-4
