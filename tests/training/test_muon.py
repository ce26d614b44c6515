"""Muon over twenty steps of real gradients beside plain PyTorch, in float64, and its cap of attention logits."""

from dataclasses import replace

import pytest
import torch

from megatron_blackmamba import model
from megatron_blackmamba.config import ConfigError, load
from megatron_blackmamba.training.step.learning_rates import Schedule
from megatron_blackmamba.training.step.optimizer import make_trainable
from megatron_blackmamba.training.step.step import Step
from tests.model.conftest import place
from tests.reference.muon import PlainMuon
from tests.reference.training import Recipe
from tests.thorough import unless
from tests.training.test_stability import FACTORS as FACTORS_OF_ADAM
from tests.training.test_stability import MULTIPLIERS, SMALL, STEPS, WIDTH, _batch, _move_off_initial_values

__all__ = ["place"]
CAP = 0.4
"""Below the logits of the first step, and of most later ones."""
ROWS = {"0.in_proj": [64, 64], "1.in_proj": [64, 64, 12, 12, 4]}
CASES = {
    "parts": ["model.attention.kv_heads=2"],
    "whole": ["model.attention.kv_heads=2", "optimizer.matrices=whole"],
    "capped, shared keys": ["model.attention.kv_heads=2", f"optimizer.qk_clip={CAP}"],
    "width": ["model.attention.kv_heads=2", *WIDTH],
    "capped": ["model.attention.kv_heads=4", f"optimizer.qk_clip={CAP}"],
}
READOUT = (12 / 32 / 32) ** 0.5 / (12 / 8 / 12) ** 0.5
"""Of the 12 rows for B, and for C, of Mamba-2, with 32 columns instead of 8."""
GROWN = ("0.in_proj", "0.out_proj", "1.out_proj", "2.linear_qkv", "2.linear_proj", "3.fc1", "3.fc2")
SCALES = {name: [0.5] for name in GROWN} | {"1.in_proj": [0.5, 0.5, READOUT, READOUT, 0.5]}
FACTORS = {name: FACTORS_OF_ADAM[name] for name in ("x_proj.weight", "dt_proj.weight", "router.weight")}
FACTORS |= {"experts.fc1": (0.5, 1.0), "experts.fc2": (0.5, 1.0)}


def run_of(*options):
    return load("tiny", [*SMALL, 'model.pattern="MS*E"', "optimizer.kind=muon", *options])


@pytest.mark.parametrize("name", unless(("capped, shared keys", "capped", "width"), CASES))
def test_twenty_steps_match_plain_pytorch(name, place):
    run = run_of(*CASES[name])
    trainable = make_trainable(run, model.build(run, place), place)
    step = Step(run, place, trainable, sources=1)
    _move_off_initial_values(trainable.model)
    weights = {name: weight.detach().clone() for name, weight in trainable.model.named_parameters()}
    attention, cap = run.model.attention, run.optimizer.qk_clip
    recipe = Recipe("MS*E", run.model.mamba2.groups, attention.heads, attention.kv_heads, "sinkhorn")
    if name == "width":
        recipe = replace(recipe, **MULTIPLIERS, factors=FACTORS)
    whole = run.optimizer.matrices == "whole"
    plain = PlainMuon(recipe, weights, rows=ROWS, whole=whole, cap=cap, scales=SCALES if name == "width" else {})
    random, schedule = torch.Generator().manual_seed(0), Schedule(run, trainable.optimizer)
    above: list[bool] = []
    for number in range(STEPS):
        recipe.rate = schedule.set(4 * number)
        batches = [_batch(random) for _ in range(2)]
        found = step.gradients(iter(batches))
        assert step.update().applied
        loss, _, _ = plain.step(batches)
        assert found.loss == pytest.approx(loss, abs=1e-10)
        if cap:
            (largest_H,) = trainable.largest_logits.values()
            assert largest_H.tolist() == pytest.approx(plain.largest, abs=1e-10)
            above += [largest > cap for largest in plain.largest]
    assert not cap or 0 < sum(above) < len(above)  # it acts, but not always
    trainable.settle()
    furthest = {
        name: float((w - plain.weights[name]).abs().max().detach()) for name, w in trainable.model.named_parameters()
    }
    assert max(furthest.values()) < 1e-10, furthest


def test_heads_end_at_the_cap(place):
    """After an update that hardly moves weights, the same batch has the cap as its largest logit, in documents too."""
    run = run_of("model.attention.kv_heads=2", "model.eod_reset=63", "optimizer.qk_clip=0.2")
    trainable = make_trainable(run, model.build(run, place), place)
    step, batches = Step(run, place, trainable, sources=1), [_batch(torch.Generator().manual_seed(0)) for _ in range(2)]
    _move_off_initial_values(trainable.model)
    (largest_H,) = trainable.largest_logits.values()
    before = []
    for rate in (1e-12, 1e-12):
        for group in trainable.optimizer.param_groups:
            group["lr"] = rate
        step.gradients(iter(batches))
        before.append(largest_H.clone())
        step.update()
    assert (before[0] > 0.2).all()
    torch.testing.assert_close(before[1], torch.full_like(before[1], 0.2), rtol=0, atol=1e-9)
    step.evaluate(iter(batches))
    assert torch.equal(largest_H, before[1])  # validation does not count


def test_cap_leaves_weights_that_do_not_learn(place):
    run = run_of("optimizer.qk_clip=1e-4", "optimizer.groups.mixers.learning_rate=0")
    trainable = make_trainable(run, model.build(run, place), place)
    (weight,) = [w for name, w in trainable.model.named_parameters() if "linear_qkv.weight" in name]
    before, step = weight.detach().clone(), Step(run, place, trainable, sources=1)
    Schedule(run, trainable.optimizer).set(0)
    step.gradients(iter([_batch(torch.Generator().manual_seed(0)) for _ in range(2)]))
    assert step.update().applied
    trainable.settle()
    assert torch.equal(weight, before)


@pytest.mark.parametrize(
    "options, reason",
    [
        (["model.attention.qk_norm=true"], r"optimizer\.qk_clip shrinks queries and keys, whose size .*qk_norm=true"),
        (["model.pattern=ME"], r"optimizer\.qk_clip: only attention layers \(\*\) have logits"),
        (["optimizer.kind=adamw"], r"optimizer\.qk_clip=1.0: optimizer\.kind=adamw does not read this key"),
    ],
)
def test_cap_without_effect_is_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        run_of("optimizer.qk_clip=1", *options)


def test_width_transfer_of_whole_weights_is_refused():
    with pytest.raises(ConfigError, match=r"model\.mup: the parts of a weight .* optimizer\.matrices=parts"):
        run_of("model.mup.base_width=8", "optimizer.matrices=whole")
