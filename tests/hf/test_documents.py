"""Documents of one sequence do not see each other: a change to one changes nothing of another, by exactly 0."""

import copy
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.interchange import hf
from megatron_blackmamba.ops import attention
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


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("resets", [True, False])
def test_blocks_of_queries_change_nothing(network, monkeypatch, padding, resets):
    functions = sys.modules[type(network.model).__module__.rpartition(".")[0] + ".functions_blackmamba"]
    network, choose = copy.deepcopy(network).double(), torch.Generator().manual_seed(0)
    ids = torch.randint(8, 60, (2, 40), generator=choose)
    ids[0, [3, 4, 20]] = ids[1, 31] = EOD if resets else 9
    keep = torch.ones_like(ids)
    keep[1, :padding] = 0
    masks, found = [], []
    attend = functions.F.scaled_dot_product_attention
    monkeypatch.setattr(
        functions.F,
        "scaled_dot_product_attention",
        lambda *given, **more: masks.append(given[3]) or attend(*given, **more),
    )
    for block in (512, 8):
        monkeypatch.setattr(functions, "BLOCK", block)
        network.zero_grad()
        logits = network(ids, attention_mask=keep).logits * keep[:, :, None]
        logits.square().sum().backward()
        read = network(ids[:, :16], attention_mask=keep[:, :16], use_cache=True)
        cache = next(value for name, value in read.items() if name in ("cache", "past_key_values"))
        later = network(ids[:, 16:], past_key_values=cache).logits
        torch.testing.assert_close(later, logits[:, 16:], atol=1e-9, rtol=1e-9)
        found.append([logits, *(p.grad.clone() for p in network.parameters() if p.grad is not None)])
    assert max(mask.shape[2] for mask in masks[-12:]) == 8
    for many, one in zip(*found, strict=True):
        torch.testing.assert_close(many, one, atol=1e-9, rtol=1e-9)


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


def test_the_decoder_reads_prompts_in_blocks(model, monkeypatch):
    tokens = torch.randint(8, 60, (2, 40), generator=torch.Generator().manual_seed(1))
    tokens[0, [3, 4, 20, 33]] = EOD
    lengths = torch.tensor([30, 19])
    masks, found = [], []
    visible = attention._visible
    monkeypatch.setattr(attention, "_visible", lambda *given: masks.append(visible(*given)) or masks[-1])
    for block in (512, 8):
        monkeypatch.setattr(attention, "BLOCK", block)
        decoder = Decoder(pack(canonical(model), torch.float32))
        state = decoder.start(2)
        logits = [decoder.read_all(state, tokens[:, :30], lengths)[1, 11:], decoder.read(state, tokens[:, 30:])]
        found.append(torch.cat([*logits, decoder.step(state, torch.tensor([9, 9]))]))
    assert max(mask.shape[2] for mask in masks[len(masks) // 2 :]) == 8
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
