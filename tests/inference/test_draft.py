"""Multi-token prediction in decoding: the same tokens as without it, in fewer passes."""

from itertools import pairwise

import pytest
import torch

from megatron_blackmamba import model as models
from megatron_blackmamba.config import load
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.draft import Guessing, why_no_draft
from megatron_blackmamba.inference.generator import Generator
from megatron_blackmamba.inference.generator import load as load_generator
from megatron_blackmamba.inference.sampling import GenerationError, Sampling
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.interchange import convert, hf, megatron
from megatron_blackmamba.interchange.canonical import main_depth
from tests.model.conftest import place

__all__ = ["place"]
SMALL = ["model.hidden_size=32", "model.vocab_size=64", "model.expert_hidden_size=24", "model.experts=4"]
SMALL += ["model.mamba2.head_dim=16", "model.mamba2.state_size=6", "model.attention.heads=4", "model.eod_reset=5"]
PROMPT = [9, 3, 5, 22, 41, 5, 8]


@pytest.fixture(scope="module", params=[("ME", "ME", "norm"), ("MS*E", "*SE", "stream")], ids=str)
def canonical(request, place):
    """A model whose weights are so large that its greedy text wanders."""
    pattern, extra, reads = request.param
    ahead = [f'model.mtp.pattern="{extra}"', f"model.mtp.reads={reads}"]
    run = load("tiny", [*SMALL, f'model.pattern="{pattern}"', *ahead, "model.init.std=0.3"])
    return megatron.of_module(models.build(run, place))


def tokens(model, **options):
    generator = Generator(Decoder(pack(model, torch.float32)), draft=model.config.mtp.pattern is not None)
    return [row for (row,) in generator.tokens([PROMPT], max_new_tokens=60, **options)]


def test_greedy_tokens_are_the_same(canonical):
    assert tokens(canonical) == tokens(main_depth(canonical))


def test_sampled_tokens_are_the_same(canonical):
    sampling = Sampling(temperature=1.0, seed=3)
    assert tokens(canonical, sampling=sampling) == tokens(main_depth(canonical), sampling=sampling)


class Planted(Guessing):
    """Guesses of which every one is right, or wrong."""

    known: list[int]
    right: bool

    def guess(self, token):
        super().guess(token)
        following = self.known[self.known.index(token) + 1]
        return following if self.right else (following + 1) % 64


@pytest.mark.parametrize("right", [True, False])
def test_guesses_change_passes_and_not_logits(canonical, right):
    decoder = Decoder(pack(canonical, torch.float32))
    guessing, state = Planted(decoder, PROMPT), decoder.start(1)
    guessing.known, guessing.right = list(range(10, 52)), right
    decoder.read(state, torch.tensor([PROMPT]))
    for token in guessing.known[:40]:
        expected = decoder.step(state, torch.tensor([token]))
        torch.testing.assert_close(guessing(torch.tensor([token])), expected, atol=2e-5, rtol=2e-5)
    assert guessing.passes == (20 if right else 40)


def test_long_prompts_are_read_in_pieces(canonical, monkeypatch):
    whole, sizes, stream = tokens(canonical), [], Decoder.stream
    monkeypatch.setattr("megatron_blackmamba.inference.draft.READ_AT_ONCE", 3)
    spy = lambda self, state, read_BL, *more: sizes.append(read_BL.shape[1]) or stream(self, state, read_BL, *more)
    monkeypatch.setattr(Decoder, "stream", spy)
    assert tokens(canonical) == whole and max(sizes) == 3


def test_models_without_extra_depth_do_not_draft(canonical, tmp_path):
    assert why_no_draft(pack(canonical, torch.float32)) is None
    assert "fp32 on CPUs only" in why_no_draft(pack(canonical, torch.bfloat16))
    convert.to_checkpoint(main_depth(canonical), tmp_path / "checkpoint", verify=False)
    with pytest.raises(GenerationError, match=r"checkpoint: has no extra depth .*Leave out --draft"):
        load_generator(tmp_path / "checkpoint", draft=True)


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
        logits_V = guessing.decoder.logits(guessing._drafted(token))
        found.append(torch.nn.functional.cross_entropy(logits_V, torch.tensor([after])))
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
