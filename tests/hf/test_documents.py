"""Documents of one sequence do not see each other: a change to one changes nothing of another, by exactly 0."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.interchange import hf
from tests.reference import tiny
from tests.reference.canonical import canonical

EOD = 7
FIRST, OTHER = [3, 9, 4, 11, EOD], [20, 1, 1, 8, EOD]
SECOND = [5, 30, 2, 6, 12, 40]


@pytest.fixture(scope="module")
def model():
    return tiny("silu", layers="ratsm", eod_reset=EOD, seed=3)


@pytest.fixture(scope="module")
def network(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents") / "hf"
    hf.write(canonical(model), folder)
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def logits_of_second(network, first):
    return network(torch.tensor([[*first, *SECOND]])).logits[0, len(first) :]


def test_an_export_keeps_documents_apart(network):
    assert torch.equal(logits_of_second(network, FIRST), logits_of_second(network, OTHER))
    found = []
    with network.get_input_embeddings().register_forward_hook(lambda *call: found.append(call[2])):
        logits = logits_of_second(network, OTHER)
    (gradient,) = torch.autograd.grad(logits.square().sum(), found)
    assert bool((gradient[:, : len(OTHER)] == 0).all()) and bool((gradient[:, len(OTHER) :] != 0).any())


def test_packed_documents_equal_documents_one_by_one(network):
    positions = torch.tensor([[*range(len(FIRST)), *range(len(SECOND))]])
    packed = network(torch.tensor([[*FIRST, *SECOND]]), position_ids=positions).logits[0]
    alone = torch.cat([network(torch.tensor([document])).logits[0] for document in (FIRST, SECOND)])
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


def test_a_cache_forgets_the_document_before(network):
    with torch.inference_mode():
        read = network(torch.tensor([[*FIRST, *SECOND[:2]]]), use_cache=True)
        steps = [read.logits[0, -1]]
        cache = next(value for name, value in read.items() if name in ("cache", "past_key_values"))
        for token in SECOND[2:]:
            steps.append(network(torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
    torch.testing.assert_close(torch.stack(steps), logits_of_second(network, OTHER)[1:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("at_once", [True, False])
def test_the_decoder_keeps_documents_apart(model, at_once):
    decoder, found = Decoder(pack(canonical(model), torch.float32)), []
    for first in (FIRST, OTHER):
        state = decoder.start(1)
        if at_once:
            decoder.read(state, torch.tensor([[*first, *SECOND[:-1]]]))
        else:
            for token in [*first, *SECOND[:-1]]:
                decoder.step(state, torch.tensor([token]))
        found.append(decoder.step(state, torch.tensor(SECOND[-1:])))
    assert torch.equal(*found)
