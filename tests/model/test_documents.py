"""Under model.eod_reset the documents of a sequence do not see each other in training, by exactly 0."""

import pytest
import torch

from megatron_blackmamba import model
from megatron_blackmamba.config import load
from tests.model.conftest import place

__all__ = ["place"]
EOD, FIRST, OTHER, SECOND = 7, [3, 9, 4, 11], [20, 1, 1, 8], [5, 30, 2, 6, 12, 40]
SMALL = ["model.pattern=M*R-S", "training.precision=fp64", "model.hidden_size=32", "model.vocab_size=64"]
SMALL += ["model.mamba2.head_dim=16", "model.mamba3.head_dim=16", "model.attention.heads=4", "model.mlp_hidden_size=40"]
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
