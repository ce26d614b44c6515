"""Our implementations against the float64 reference, and the check that ends every conversion."""

import os

import pytest
import torch

from megatron_blackmamba.interchange import folder, hf, parity
from megatron_blackmamba.interchange.canonical import in_memory
from megatron_blackmamba.interchange.observation import Observation, Router, compare
from tests.reference.canonical import canonical, config_of


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


# The decisions of a router, and their margins.


def test_margin_is_the_lead_of_the_best_expert():
    for logits, choice, margin in [([1.0, 4.0], 1, 3.0), ([5.0, 1.0, 3.0], 0, 2.0), ([2.0, 2.0], None, 0.0)]:
        router = Router.of(3, torch.tensor([[logits]]), top_k=1)
        assert router.layer == 3
        assert choice in (None, router.choice_BSK.item())
        assert router.margin_BS.item() == margin


def test_several_experts_tie_with_the_first_left_out():
    router = Router.of(1, torch.tensor([[[5.0, 1.0, 3.0, 2.5]]]), top_k=2)
    assert router.choice_BSK.tolist() == [[[0, 2]]]
    assert router.margin_BS.item() == 0.5
    assert Router.of(1, torch.zeros(1, 1, 2), top_k=2).margin_BS.isinf().all()  # all are chosen


def test_single_expert_is_never_at_a_tie():
    router = Router.of(1, torch.zeros(2, 5, 1), top_k=1)
    assert router.choice_BSK.eq(0).all() and router.choice_BSK.shape == (2, 5, 1)
    assert router.margin_BS.isinf().all()


# A folder that appears whole is also on the disk: its contents before the rename, its name after it.


def test_contents_are_synced_before_rename_name_after(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(folder, "sync_folder", lambda path: synced.append((path, os.listdir(tmp_path))))
    with folder.new_folder(tmp_path / "out") as temporary:
        (temporary / "part").mkdir()
    before, after = [temporary.name], ["out"]
    assert synced == [(temporary, before), (temporary / "part", before), (tmp_path, after)]


def test_a_tie_excuses_only_what_follows_it():
    logits = torch.arange(12.0).view(1, 4, 3)
    margin = torch.tensor([[1.0, 1e-6, 1.0, 1.0]])
    one = Observation(logits, [Router(0, torch.zeros(1, 4, 1, dtype=torch.long), margin)])
    untold = compare(one, Observation(logits + torch.tensor([0, 0, 1.0, 0])[None, :, None], []))
    assert untold.agrees and (untold.tokens, untold.ties) == (1, 3)
    assert compare(one, Observation(logits.clone(), [])).ties == 0
    assert not compare(one, Observation(logits + torch.tensor([1.0, 0, 0, 0])[None, :, None], [])).agrees
