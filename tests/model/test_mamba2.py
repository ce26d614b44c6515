"""Mamba-2 layers against transformers' own, with the same weights, and their initial values."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.interchange.native_grid import NORMS_GROUPS, WHY_NOT_GROUPS

MODEL = ["model.pattern=SS", "model.mamba2.head_dim=16", "model.mamba2.state_size=24", "training.precision=fp32"]
TOKENS_BS = torch.randint(512, (2, 150), generator=torch.Generator().manual_seed(0))
NAMES = {"embedding.word_embeddings.": "backbone.embeddings.", "decoder.final_layernorm.": "backbone.norm_f."}


def theirs(name):
    for ours, other in NAMES.items():
        name = name.replace(ours, other)
    return name.replace("decoder.layers.", "backbone.layers.")


def peer(model, groups):
    """transformers' model with our weights; its last norm has no bias, so ours takes its place."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    described = {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": groups}
    made = Mamba2ForCausalLM(Mamba2Config(**described, vocab_size=512, num_hidden_layers=2, tie_word_embeddings=True))
    made.backbone.norm_f = nn.LayerNorm(64)
    weights = {theirs(name): weight for name, weight in model.named_parameters()}
    made.load_state_dict(weights | {"lm_head.weight": weights["backbone.embeddings.weight"]})
    return made.train()


def randomised(model):
    """Move every weight off the value that a fresh model has."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.1 if weight.dim() == 1 else weight[0].numel() ** -0.5
            moved = torch.randn(weight.shape, generator=g) * scale
            weight.copy_(weight + moved if weight.dim() == 1 or "embedding" in name else moved)


@pytest.mark.parametrize("groups", [1, 2])
def test_logits_and_gradients_match_transformers(build, groups):
    if groups > 1 and not NORMS_GROUPS:
        pytest.skip(WHY_NOT_GROUPS)
    ours = build(*MODEL, f"model.mamba2.groups={groups}")
    randomised(ours)
    other = peer(ours, groups)
    logits, expected = ours(TOKENS_BS), other(TOKENS_BS).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    for output in (logits, expected):
        F.cross_entropy(output[:, :-1].flatten(0, 1), TOKENS_BS[:, 1:].flatten()).backward()
    gradients = {name: weight.grad for name, weight in other.named_parameters()}
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[theirs(name)], atol=1e-5, rtol=1e-5, msg=name)


def test_gradients_match_float64(build):
    settings = [*MODEL[:-1], "model.mamba2.groups=2", "model.eod_reset=7"]
    tokens = TOKENS_BS.clone()
    tokens[0, 40] = tokens[1, 99] = 7
    models = [build(*settings, f"training.precision={precision}") for precision in ("fp32", "fp64")]
    for model in models:
        randomised(model)
        model(tokens, tokens.roll(-1, 1)).mean().backward()
    for (name, single), (_, double) in zip(*(model.named_parameters() for model in models), strict=True):
        torch.testing.assert_close(single.grad.double(), double.grad, atol=1e-6, rtol=1e-5, msg=name)


def test_states_restart_at_documents(build):
    model = build(*MODEL, "model.eod_reset=7")
    tokens = TOKENS_BS[:1].clone()
    tokens[tokens == 7] = 8
    tokens[0, 69] = 7
    torch.testing.assert_close(model(tokens)[:, 70:], model(tokens[:, 70:]), atol=1e-6, rtol=1e-5)


def test_initial_decays_and_time_steps_match_mamba_ssm(build):
    mixer = build("model.pattern=S", "model.hidden_size=512", "model.mamba2.head_dim=4").decoder.layers[0].mixer
    rates, steps = mixer.A_log.exp(), F.softplus(mixer.dt_bias)
    assert 1 <= rates.min() < 2 and 15 < rates.max() <= 16
    assert 1e-3 <= steps.min() < 2e-3 and 0.08 < steps.max() <= 0.1
    assert steps.log().mean().item() == pytest.approx(math.log(0.01), abs=0.3)
    assert bool((mixer.D == 1).all())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.mamba2.head_dim=24"], "= 128 is not divisible by model.mamba2.head_dim=24"),
        (["model.mamba2.groups=3", "model.mamba2.head_dim=16"], "8 Mamba-2 heads are not divisible by .*groups=3"),
    ],
)
def test_widths_that_do_not_divide_are_refused(build, overrides, message):
    with pytest.raises(ValueError, match=message):
        build("model.pattern=SE", *overrides)
