"""Multi-token prediction in decoding: the same tokens as without it, in fewer passes."""

from itertools import pairwise

import pytest
import torch

from megatron_blackmamba import model as models
from megatron_blackmamba.config import load
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.draft import Guessing
from megatron_blackmamba.inference.generator import Generator
from megatron_blackmamba.inference.sampling import Sampling
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.interchange import convert, hf, megatron
from megatron_blackmamba.interchange.canonical import main_depth
from tests.model.conftest import place

__all__ = ["place"]
SMALL = ["model.hidden_size=32", "model.vocab_size=64", "model.expert_hidden_size=24", "model.experts=4"]
SMALL += ["model.mamba2.head_dim=16", "model.mamba2.state_size=6", "model.attention.heads=4", "model.eod_reset=5"]
PROMPT = [9, 3, 5, 22, 41, 5, 8]


@pytest.fixture(scope="module", params=[("ME", "ME"), ("MS*E", "*SE")], ids=str)
def canonical(request, place):
    """A model whose weights are so large that its greedy text wanders."""
    pattern, extra = request.param
    run = load("tiny", [*SMALL, f'model.pattern="{pattern}"', f'model.mtp.pattern="{extra}"', "model.init.std=0.3"])
    return megatron.of_module(models.build(run, place))


def tokens(model, **options):
    generator = Generator(Decoder(pack(model, torch.float32)))
    return [row for (row,) in generator.tokens([PROMPT], max_new_tokens=60, **options)]


def test_greedy_tokens_are_the_same(canonical):
    assert tokens(canonical) == tokens(main_depth(canonical))


def test_sampled_tokens_are_the_same(canonical):
    sampling = Sampling(temperature=1.0, seed=3)
    assert tokens(canonical, sampling=sampling) == tokens(main_depth(canonical), sampling=sampling)


@pytest.mark.parametrize("right", [True, False])
def test_guesses_change_passes_and_not_logits(canonical, right, monkeypatch):
    decoder = Decoder(pack(canonical, torch.float32))
    known = tokens(main_depth(canonical))
    guessing = Guessing(decoder, PROMPT)
    read = guessing.draft.read
    state = decoder.start(1)
    decoder.read(state, torch.tensor([PROMPT]))

    for number, token in enumerate(known[:40]):
        guess = known[number + 1] if right else (known[number + 1] + 1) % 64

        def planted(*inputs, guess=guess):
            return torch.nn.functional.one_hot(torch.tensor([[guess]]), 64) + 0 * read(*inputs)

        monkeypatch.setattr(guessing.draft, "read", planted)
        expected = decoder.step(state, torch.tensor([token]))
        torch.testing.assert_close(guessing(torch.tensor([token])), expected, atol=2e-5, rtol=2e-5)
    assert guessing.passes == (20 if right else 40)


def test_draft_computes_what_training_does(canonical, place):
    run = load("tiny", [*SMALL, f'model.pattern="{canonical.config.pattern}"', "model.init.std=0.3"])
    run = run.model_copy(update={"model": canonical.config})
    network = models.build(run, place)
    ids = torch.tensor([PROMPT])
    for router in (m for m in network.modules() if hasattr(m, "tokens_E")):
        router.eval()
    network.training = network.decoder.training = True
    network(ids[:, :-1], ids[:, 1:])
    losses_S = network.mtp_losses_BS[0, :-1].detach()
    guessing = Guessing(Decoder(pack(canonical, torch.float32)), PROMPT[:1])
    found = []
    for token, after in pairwise(PROMPT[1:]):
        logits_V = guessing.draft.read(
            guessing.stream_1D[:, None], torch.tensor([[token]]), torch.tensor([[guessing._last]])
        )
        found.append(torch.nn.functional.cross_entropy(logits_V[0], torch.tensor([after])))
        guessing._last = token
        guessing.stream_1D = guessing.decoder.stream(guessing.state, torch.tensor([[token]]))[:, 0]
    torch.testing.assert_close(torch.stack(found), losses_S, atol=2e-5, rtol=2e-5)


def test_exports_leave_the_extra_depth_out(canonical, tmp_path):
    convert.to_hf(canonical, tmp_path / "hf", check="none")
    exported = hf.read(tmp_path / "hf")
    assert exported.config.mtp.pattern is None
    assert exported.entries.keys() == main_depth(canonical).entries.keys()
    assert tokens(exported) == tokens(canonical)
    convert.to_checkpoint(canonical, tmp_path / "checkpoint", verify=False)
    assert megatron.read(tmp_path / "checkpoint").entries.keys() == canonical.entries.keys()
