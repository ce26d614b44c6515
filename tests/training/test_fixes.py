"""Each fix of megatron-core's optimizer, left out in turn: what breaks."""

from types import SimpleNamespace

import pytest
import torch

from megatron_blackmamba.config import ParallelConfig
from megatron_blackmamba.runtime import world
from megatron_blackmamba.runtime.reduction import reduction
from megatron_blackmamba.training import fixes, optimizer
from tests.training.short_runs import Run

pytestmark = pytest.mark.xdist_group("short_runs")
NAMES = [fix.name for fix in (*fixes.OF_BUFFERS, *fixes.OF_OPTIMIZER)]


@pytest.fixture(scope="module")
def place():
    yield world.start(ParallelConfig())
    world.shutdown()


def differs_after_resume(place, folder, kind, left_out, *overrides):
    """Return whether a resumed run leaves the one that went on; the checkpoint is saved without a fix."""
    first = Run(place, folder, kind, *overrides, skip=left_out).train(3)
    first.checkpoints.save(3, {})
    first.checkpoints.finish(wait=True)
    resumed = Run(place, folder, kind, *overrides).resumed()
    return not torch.equal(resumed.train(2).weights(), first.train(2).weights())


def padding(place, folder, left_out, monkeypatch):
    monkeypatch.setattr(optimizer, "reduction", lambda config, size: reduction(config, 2))  # several buckets
    return differs_after_resume(place, folder, "bf16", left_out, "training.overlap=true", "training.bucket_size=100")


def order(place, folder, left_out, monkeypatch):
    try:
        return differs_after_resume(place, folder, "bf16", left_out)
    except RuntimeError as error:  # where the two weights differ in size
        return "must match the size" in str(error)


def first_state(place, folder, left_out, monkeypatch):
    run = Run(place, folder, "sgd").train(3)
    run.checkpoints.save(3, {})
    run.checkpoints.finish(wait=True)
    try:
        Run(place, folder, "sgd", skip=left_out).resumed()
    except TypeError as error:
        return "NoneType" in str(error)
    return False


def norm(place, folder, left_out, monkeypatch):
    run = Run(place, folder, "whole", skip=left_out)
    run.step.gradients(run.batches())
    next(run.trainable.model.parameters()).main_grad.fill_(float("nan"))
    applied = run.step.update().applied
    return applied or not run.weights().isfinite().all()


def settings(place, folder, left_out, monkeypatch):
    run = Run(place, folder, "bf16").train(3)
    run.checkpoints.save(3, {})
    run.checkpoints.finish(wait=True)
    changed = Run(place, folder, "bf16", "optimizer.beta1=0.5", skip=left_out).resumed()
    return any(group["betas"][0] != 0.5 for group in changed.trainable.optimizer.param_groups)


def rates(place, folder, left_out, monkeypatch):
    run = Run(place, folder, "bf16", skip=left_out)
    return any("max_lr" in group for group in run.trainable.optimizer.param_groups)


BREAKS = {
    "bucket-padding": padding,
    "first-state": first_state,
    "finite-norm": norm,
    "state-order": order,
    "learning-rates": rates,
    "settings": settings,
}


@pytest.mark.parametrize("name", NAMES)
def test_every_fix_is_necessary(place, tmp_path, monkeypatch, name):
    assert not BREAKS[name](place, tmp_path / "with", frozenset(), monkeypatch)
    assert BREAKS[name](place, tmp_path / "without", frozenset({name}), monkeypatch), f"is the fix {name!r} needed?"


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_non_finite_gradient_norms_are_refused(norm):
    optimizer = SimpleNamespace(get_grad_norm=lambda: norm)
    fixes._refuse_non_finite(optimizer, None)
    with pytest.raises(fixes.NonFiniteGradient):
        optimizer.get_grad_norm()


def test_every_fix_says_why_it_exists():
    assert len(NAMES) == len(set(NAMES))
    assert all(len(fix.why) > 40 for fix in (*fixes.OF_BUFFERS, *fixes.OF_OPTIMIZER))
