"""Our implementations against the float64 reference, and the check that ends every conversion."""

import pytest
import torch

from megatron_blackmamba.interchange import hf, parity, through_hf, through_megatron
from megatron_blackmamba.interchange.canonical import in_memory
from megatron_blackmamba.interchange.observation import Observation, Router, compare
from tests.reference import forward, tiny
from tests.reference.canonical import canonical, config_of

SIDES = {"megatron": through_megatron.observe, "hf": through_hf.observe}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("eod_reset", [None, 7])
def test_agrees_with_the_reference_in_logits_and_routing(side, activation, eod_reset):
    model = tiny(activation, eod_reset=eod_reset)
    tokens = parity.probe_tokens(canonical(model), length=24)
    tokens[0, 9] = 7
    seen = SIDES[side](canonical(model), tokens)
    for row in range(len(tokens)):
        trace = forward(model.weights, model.config, tokens[row].tolist())
        torch.testing.assert_close(
            seen.logits_BSV[row].double(), torch.from_numpy(trace.logits_SV), atol=3e-5, rtol=3e-5
        )
        assert [router.choice_BSK[row, :, 0].tolist() for router in seen.routers] == list(trace.routes.values())


@pytest.fixture
def exported(silu, tokenizer_file, tmp_path):
    model = canonical(silu, tokenizer=tokenizer_file)
    hf.write(model, tmp_path)
    return model, tmp_path


def test_faithful_export_passes_on_random_and_real_tokens(exported):
    model, folder = exported
    comparison = parity.check(model, hf.read(folder))
    assert comparison.agrees and comparison.tokens == 3 * 64
    assert "top-1 agreement 192/192" in str(comparison)


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.mixer.in_proj.weight", "decoder.layers.3.mixer.local_experts.2.linear_fc1.weight"]
)
def test_swapped_halves_are_named(silu, name):
    weight = silu.weights[name]
    swapped = silu.weights | {name: weight.roll(weight.shape[0] // 2, 0)}
    with pytest.raises(parity.ParityError, match=name):
        parity.check(canonical(silu), in_memory(config_of(silu), swapped))


def test_another_activation_is_caught(silu):
    gelu = in_memory(config_of(silu).model_copy(update={"activation": "gelu"}), silu.weights)
    with pytest.raises(parity.ParityError, match="its outputs do not"):
        parity.check(canonical(silu), gelu)


def observation(margin: float, choice: int, logit: float = 0.0) -> Observation:
    logits = torch.zeros(1, 4, 5)
    logits[:, :, 0], logits[:, 2:, 1] = 1.0, logit
    choices = torch.zeros(1, 4, dtype=torch.long)
    choices[:, 2] = choice
    return Observation(logits, [Router(1, choices[..., None], torch.full((1, 4), margin))])


def test_only_clear_routing_differences_fail():
    tied = compare(observation(1e-6, 0), observation(1e-6, 1, logit=0.5))
    assert tied.agrees and tied.tokens == 2 and tied.ties == 2
    clear = compare(observation(0.1, 0), observation(0.1, 1))
    assert not clear.agrees and clear.differing_decisions == 1


def test_logits_that_are_not_numbers_never_agree():
    assert not compare(observation(0.1, 0), observation(0.1, 0, logit=float("nan"))).agrees
