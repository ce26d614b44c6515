"""Groups of experts, and the scope of the softmax router's loss: choices by plain loops, exports, and refusals."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_blackmamba import routers
from megatron_blackmamba.config import ConfigError, load
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.interchange import convert, hf, megatron, native, zyphra
from megatron_blackmamba.interchange.canonical import InterchangeError
from tests.reference.training import best

GROUPS = ["model.top_k=2", "model.router.groups=4", "model.router.group_top_k=2"]
KINDS = {
    "softmax": ["model.router.kind=softmax", "model.top_k=4"],
    "one group": ["model.router.kind=softmax", "model.router.group_top_k=1"],
    "normalized": ["model.router.kind=softmax", "model.router.normalize=true", "model.top_k=4"],
    "sigmoid": ["model.router.kind=softmax", "model.router.gate=sigmoid", "model.top_k=4"],
    "expert_bias": ["model.router.kind=expert_bias", "model.top_k=4"],
}
CASES = pytest.mark.parametrize("name", KINDS)


@torch.no_grad()
def with_wide_logits(built):
    """Spread logits and biases, so that groups differ."""
    random = torch.Generator().manual_seed(2)
    for module in built.modules():
        if hasattr(module, "tokens_E"):
            module.weight.normal_(0, 0.3, generator=random)
            if module.expert_bias is not None:
                module.expert_bias.normal_(0, 0.2, generator=random)
    return built


def by_loops(scores_E, top_k, groups, chosen):
    """Return the experts of a token, in the groups whose top_k / chosen best experts sum to most."""
    each = len(scores_E) // groups
    sums = [sum(sorted(scores_E[g * each : (g + 1) * each])[-(top_k // chosen) :]) for g in range(groups)]
    among = [g * each + e for g in best(sums, chosen, list(range(groups))) for e in range(each)]
    return sorted(best(scores_E, top_k, among))


@CASES
@torch.no_grad()
def test_tokens_choose_within_their_best_groups(name, build):
    built = with_wide_logits(build("model.pattern=E", "training.precision=fp64", *GROUPS, *KINDS[name]))
    router, described = built.decoder.layers[0].mixer.router, built.config.described
    x_SBD = torch.randn(40, 1, 64, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    logits_TE = router.gating(x_SBD).flatten(0, 1)
    scores_TE = {"normalized": logits_TE, "sigmoid": logits_TE.sigmoid()}.get(name, logits_TE.softmax(-1))
    if name == "expert_bias":
        scores_TE = logits_TE.sigmoid() + router.expert_bias
    how = described.top_k, 4, described.router.group_top_k
    expected = [by_loops(scores_E, *how) for scores_E in scores_TE.tolist()]
    assert expected != [sorted(best(scores_E, how[0], list(range(8)))) for scores_E in scores_TE.tolist()]
    for training in (True, False):
        chosen_TE = router.train(training)(x_SBD).chosen
        assert [row.nonzero().flatten().tolist() for row in chosen_TE] == expected
    choice_TK = router.use.choice(logits_TE, how[0], getattr(router, "expert_bias", None))
    assert choice_TK.sort(-1).values.tolist() == expected


@CASES
@torch.no_grad()
def test_decoder_and_export_write_the_same_text(name, build, tmp_path):
    words = ["model.pattern=MEME", "training.precision=fp32", "model.init.std=0.3", *GROUPS, *KINDS[name]]
    built = with_wide_logits(build(*words)).eval()
    ids_BL = torch.randint(512, (2, 12), generator=torch.Generator().manual_seed(0))
    source = megatron.of_module(built)
    convert.to_hf(source, tmp_path / "hf", check="none")
    exported = hf.read(tmp_path / "hf")
    assert exported.config.router == source.config.router
    decoder = Decoder(pack(exported, torch.float32))
    state, tokens = decoder.start(2), ids_BL
    last_BV = decoder.read(state, ids_BL)
    for _ in range(8):
        tokens = torch.cat([tokens, last_BV.argmax(-1, keepdim=True)], dim=1)
        last_BV = decoder.step(state, tokens[:, -1])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True, dtype=torch.float32).eval()
    greedy = theirs.generate(ids_BL, max_new_tokens=8, do_sample=False, eos_token_id=-1)
    assert greedy.tolist() == tokens.tolist() and len(set(tokens[0, 12:].tolist())) > 2
    logits = built(tokens)
    torch.testing.assert_close(theirs(tokens).logits, logits, atol=1e-4, rtol=1e-4)
    assert logits[:, 11:-1].argmax(-1).tolist() == tokens[:, 12:].tolist()


SOFTMAX = "model.router.kind=softmax"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.router.groups=4"], "router.kind=sinkhorn does not read this key.*=expert_bias or softmax"),
        (["model.router.group_top_k=2", SOFTMAX], r"group_top_k=2 needs model\.router\.groups"),
        (["model.router.groups=3", SOFTMAX], r"model\.experts=8 is not divisible by model\.router\.groups=3"),
        ([*GROUPS, SOFTMAX, "model.top_k=3"], "top_k must be a multiple of group_top_k"),
        ([*GROUPS, SOFTMAX, "model.router.group_top_k=1", "model.top_k=3"], "at most 2 times it"),
        ([*GROUPS, SOFTMAX, "model.router.groups=2", "model.router.group_top_k=4"], "group_top_k=4 of 2 groups"),
        ([SOFTMAX, "model.router.scope=rank"], "scope=rank: the router kind softmax has tensor or sequence or data"),
        (["model.router.scope=sequence"], "scope=sequence: the router kind sinkhorn has rank or tensor or data"),
        (["model.router.scope=data", "model.router.kind=expert_bias"], "scope=data: .*does not read this key"),
    ],
)
def test_groups_and_scopes_that_cannot_be_are_refused(overrides, told):
    with pytest.raises(ConfigError, match=told):
        load("tiny", overrides)


@pytest.mark.parametrize("words", [[*GROUPS, SOFTMAX], [*GROUPS, "model.router.kind=expert_bias"]])
def test_formats_without_groups_refuse_them(words):
    described = load("tiny", ["model.pattern=*E*E", *words]).model
    assert "model.router.groups=4: set 1" in native.described(described)
    with pytest.raises(InterchangeError, match=r"model\.top_k is 2; the released code"):
        zyphra.require_expressible(load("tiny", words).model, "here")


def test_loss_of_whole_batch_depends_on_layout():
    kind = routers.kind_of("softmax")
    answers = {
        scope: kind.layouts(load("tiny", [SOFTMAX, f"model.router.scope={scope}"]).model) for scope in kind.scopes
    }
    assert answers["tensor"] is answers["sequence"] is True
    assert "data-parallel ranks" in answers["data"].reason
