"""Validation with the router as in inference, and with the experts balanced as in training."""

from types import SimpleNamespace

import pytest
import torch

from megatron_blackmamba.config import ParallelConfig
from megatron_blackmamba.runtime import world
from megatron_blackmamba.training import loop
from megatron_blackmamba.training.step import validation
from tests.training.short_runs import Run

from megatron.core.transformer.moe.router import Router


@pytest.fixture
def place():
    yield world.start(ParallelConfig())
    world.shutdown()


def test_balanced_validation_routes_as_in_training(place, tmp_path):
    run = Run(place, tmp_path, "whole", "model.init.std=0.5")
    (router,) = (module for module in run.trainable.model.modules() if isinstance(module, Router))
    router.bias.data = torch.tensor([4.0, -4.0])  # by its largest logit every token goes to the first expert
    shares = {}
    for balanced in (False, True):
        found = run.step.evaluate(run.batches(), routed_as_trained=balanced)
        counts = next(counts for counts in found.expert_tokens if sum(counts))
        shares[balanced] = counts[0] / sum(counts)
    assert shares[False] > 0.9
    assert 0.4 < shares[True] < 0.6
    assert all(module.training for module in run.trainable.model.modules())


def test_the_watchdog_hears_of_every_source(monkeypatch):
    data = SimpleNamespace(validation={"web": None, "books": None}, source_names=["web", "code", "books"])
    monkeypatch.setattr(validation, "_of_source", lambda config, world, data, step, source, *_: float(source))
    heard = []
    assert validation.validate(None, None, data, None, heard.append) == {"books": 2.0, "web": 0.0}
    assert heard == ["validation on books", "validation on web"]


def test_weights_are_gathered_before_validation(monkeypatch):
    done = []
    monkeypatch.setattr(loop, "validate", lambda *_: done.append("validate") or {})
    trainable = SimpleNamespace(settle=lambda: done.append("settle"))
    parts = dict.fromkeys(("config", "world", "data", "step"))
    loop.Trainer.validate(SimpleNamespace(trainable=trainable, watchdog=SimpleNamespace(alive=None), **parts))
    assert done == ["settle", "validate"]
