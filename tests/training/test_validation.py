"""Validation with the router as in inference, and with the experts balanced as in training."""

from types import SimpleNamespace

import numpy as np
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


class Held(list):
    """Samples of which some tokens do not count, more of them in each."""

    def __init__(self, count, length):
        random = torch.Generator().manual_seed(1)
        for number in range(count):
            tokens = torch.randint(32, (length + 1,), generator=random)
            counts = (torch.arange(length) >= number).float()
            self.append({"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": counts})


def test_every_token_counts_alike(place, tmp_path):
    """Two full batches and half of a third, which is filled up with samples that do not count."""
    run, held = Run(place, tmp_path, "whole", "model.init.std=0.5"), Held(5, 16)
    data, heard = SimpleNamespace(validation={"web": held}, source_names=["code", "web"]), []
    run.step.sources = 2
    found = validation.validate(run.config, place, data, run.step, heard.append)
    assert heard == ["validation on web"] * 3  # a sign of life for each batch
    model = run.trainable.model.eval()
    tokens_BS, labels_BS, mask_BS = (torch.stack([s[key] for s in held]) for key in ("tokens", "labels", "loss_mask"))
    with torch.no_grad():
        losses_BS = model(tokens_BS, labels_BS)
    assert found == {"web": pytest.approx(float((losses_BS * mask_BS).sum() / mask_BS.sum()), rel=1e-5)}
    batches = [slice(first, first + 2) for first in (0, 2, 4)]
    unweighted = [(losses_BS * mask_BS)[of].sum() / mask_BS[of].sum() for of in batches]
    assert abs(sum(unweighted) / 3 - found["web"]) > 1e-3


def test_ranks_share_the_count_of_bytes(place, tmp_path, monkeypatch):
    run, held, heard = Run(place, tmp_path, "whole"), Held(5, 16), []
    tokenizer = SimpleNamespace(token_bytes=np.arange(32))
    monkeypatch.setattr(validation, "load_tokenizer", lambda *_, **__: tokenizer)
    shards = [SimpleNamespace(manifest=SimpleNamespace(eod_id=0))]
    data = SimpleNamespace(validation={"web": held}, record={"tokenizer": {"file": __file__}}, shards=shards)
    labels = torch.cat([sample["labels"][sample["loss_mask"] > 0] for sample in held])
    parts = [validation._counts(run.config, data, heard.append, rank, 2)["web"] for rank in (0, 1)]
    assert [sum(of_ranks) for of_ranks in zip(*parts, strict=True)] == [int(labels.sum()), len(labels)]
    assert heard == ["the bytes of web"] * 5
    assert validation.bytes_per_token(run.config, place, data, heard.append) == {"web": float(labels.double().mean())}


def test_weights_are_gathered_before_validation(monkeypatch):
    done = []
    monkeypatch.setattr(loop, "validate", lambda *_: done.append("validate") or {})
    trainable = SimpleNamespace(settle=lambda: done.append("settle"))
    parts = dict.fromkeys(("config", "world", "data", "step"))
    loop.Trainer.validate(SimpleNamespace(trainable=trainable, watchdog=SimpleNamespace(alive=None), **parts))
    assert done == ["settle", "validate"]
