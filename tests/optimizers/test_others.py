"""Muon beside the ones of emerging-optimizers and megatron-core 0.19, on the same gradients."""

import pytest
import torch

from megatron_blackmamba import model
from megatron_blackmamba.config import load
from megatron_blackmamba.training.step.learning_rates import Schedule
from megatron_blackmamba.training.step.optimizer import make_trainable
from tests.engine.test_muon import DECAY, MOMENTUM, RATE, RUN, place, short
from tests.thorough import thorough

__all__ = ["place"]
pytestmark = thorough
emerging = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers")
megatron = pytest.importorskip("megatron.core.optimizer.emerging_optimizers")

SETTINGS = {"lr": RATE, "momentum": MOMENTUM, "weight_decay": DECAY, "nesterov": True, "extra_scale_factor": 0.2}
SETTINGS |= {"coefficient_type": "quintic"}
QUERIES = {"split_qkv": True, "is_qkv_fn": lambda weight: weight.shape[0] == 32, "qkv_split_shapes": [8, 4, 4]}
WHOLE = ("0.mixer.out_proj", "2.mixer.out_proj", "3.mixer.linear_proj", "4.mixer.linear_fc2")
FUSED = ("0.mixer.in_proj", "2.mixer.in_proj", "4.mixer.linear_fc1")
STEPS = 3


def ours(place, matrices):
    """Return the weights at first and at last, and the gradients, by name."""
    config = load("tiny", [*RUN, "training.precision=fp32", f"optimizer.matrices={matrices}"])
    trainable = make_trainable(config, model.build(config, place), place)
    weights = {short(name): p for name, p in trainable.model.named_parameters()}
    before = {name: p.detach().clone() for name, p in weights.items()}
    random = torch.Generator().manual_seed(5)
    gradients = {name: torch.randn(STEPS, *p.shape, generator=random) for name, p in weights.items()}
    for step in range(STEPS):
        Schedule(config, trainable.optimizer).set(0)
        for name, p in weights.items():
            p.main_grad.copy_(gradients[name][step])
        trainable.optimizer.step()
    return before, {name: p.detach().clone() for name, p in weights.items()}, gradients


def moved_by(kind, before, gradients, **settings):
    weight = torch.nn.Parameter(before.clone())
    optimizer = kind([weight], **SETTINGS, **settings)
    for weight.grad in gradients:
        optimizer.step()
    return weight.detach()


def apart(one, other, before):
    """Return how far two weights are from each other, over how far one has moved."""
    return float((one - other).norm() / (one - before).norm())


@pytest.mark.parametrize("kind", [emerging.Muon, megatron.TensorParallelMuon])
def test_others_take_the_same_steps(place, kind):
    before, after, gradients = ours(place, "parts")
    _, after_whole, _ = ours(place, "whole")
    for name in (*WHOLE, *FUSED):
        theirs = moved_by(kind, before[name], gradients[name], fp32_matmul_prec="highest")
        assert apart(after_whole[name], theirs, before[name]) < 1e-5
        if name in FUSED:  # they orthogonalize it as a whole
            assert apart(after[name], theirs, before[name]) > 0.1
        in_bf16 = moved_by(kind, before[name], gradients[name])  # their default
        assert 1e-4 < apart(after_whole[name], in_bf16, before[name]) < 0.05


def test_megatron_splits_queries_as_here(place):
    before, after, gradients = ours(place, "parts")
    name = "3.mixer.linear_qkv"
    theirs = moved_by(megatron.TensorParallelMuon, before[name], gradients[name], fp32_matmul_prec="highest", **QUERIES)
    assert apart(after[name], theirs, before[name]) < 1e-5
