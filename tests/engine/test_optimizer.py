"""Each change of megatron-core's optimizer, left out in turn: what breaks."""

import pytest
import torch

from megatron_blackmamba.checkpoint.sharded import state_to_save
from megatron_blackmamba.config import ParallelConfig
from megatron_blackmamba.engine import changes
from megatron_blackmamba.engine.parts.optimizer import NonFiniteGradient
from megatron_blackmamba.optimizers import register, unregister
from megatron_blackmamba.runtime import world
from tests.optimizers.lion import Lion
from tests.training.short_runs import KINDS, Run

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

pytestmark = pytest.mark.xdist_group("short_runs")


@pytest.fixture(scope="module")
def place():
    yield world.start(ParallelConfig())
    world.shutdown()


def differs_after_resume(place, folder, kind, left_out, *overrides):
    """Return whether a resumed run leaves the one that went on; the checkpoint is saved without a change."""
    first = Run(place, folder, kind, *overrides, skip=left_out).train(3)
    first.checkpoints.save(3, {})
    first.checkpoints.finish(wait=True)
    resumed = Run(place, folder, kind, *overrides).resumed()
    return not torch.equal(resumed.train(2).weights(), first.train(2).weights())


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


HASHED = ["model.pattern=E", "model.router.kind=hash", "model.tie_embeddings=false"]
SAME_SIZE = [*HASHED, "optimizer.groups.embedding.learning_rate=2", "optimizer.groups.head.learning_rate=0.5"]
"""Embedding and head have the same shape, and each is a group by itself."""


def groups(place, folder, left_out, monkeypatch):
    """Return whether a resumed run leaves the one that went on, or one that goes back as a guard's rewind does."""
    first = Run(place, folder, "whole", *SAME_SIZE, skip=left_out).train(3)
    first.checkpoints.save(3, {})
    first.checkpoints.finish(wait=True)
    resumed = Run(place, folder, "whole", *SAME_SIZE, skip=left_out).resumed().train(2).weights()
    expected = first.train(2).weights()
    return not torch.equal(resumed, expected) or not torch.equal(first.resumed().train(2).weights(), expected)


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


def copies(place, folder, left_out, monkeypatch):
    """Return whether a save copies the optimizer's state, as a gather does on every rank."""
    run = Run(place, folder, "bf16", skip=left_out).train(1)
    held = {
        tensor.untyped_storage().data_ptr()
        for part in run.trainable.optimizer.chained_optimizers
        for tensors in ([*part.optimizer.state], *(state.values() for state in part.optimizer.state.values()))
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    }
    tensors, _ = state_to_save(run.trainable.model, run.trainable.optimizer)
    entries = [entry for entry in nested_values(tensors) if entry.key.startswith("optimizer.")]
    assert entries
    return any(entry.data.untyped_storage().data_ptr() not in held for entry in entries)


def own_optimizer(place, folder, left_out, monkeypatch):
    register(Lion)
    try:
        run = Run(place, folder, "whole", "optimizer.kind=lion", skip=left_out)
    finally:
        unregister(Lion.name)
    return any(type(part.optimizer).__name__ != "LionOptimizer" for part in run.trainable.optimizer.chained_optimizers)


def rounded_adam(place, folder, left_out, monkeypatch):
    run = Run(place, folder, "whole_narrow", skip=left_out)
    return any(part.optimizer.moments is None for part in run.trainable.optimizer.chained_optimizers)


def loss_scale(place, folder, left_out, monkeypatch):
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.ones(2))
    Run(place, folder, "whole", skip=left_out)
    return MoEAuxLossAutoScaler.main_loss_backward_scale is not None


BREAKS = {
    "own-optimizer": own_optimizer,
    "bf16-adam": rounded_adam,
    "loss-scale": loss_scale,
    "first-state": first_state,
    "finite-norm": norm,
    "state-order": order,
    "learning-rates": rates,
    "settings": settings,
    "own-groups": groups,
    "own-shards": copies,
}


@pytest.mark.parametrize("name", BREAKS)
def test_every_change_of_the_optimizer_is_necessary(place, tmp_path, monkeypatch, name):
    assert not BREAKS[name](place, tmp_path / "with", frozenset(), monkeypatch)
    assert BREAKS[name](place, tmp_path / "without", frozenset({name}), monkeypatch), f"is the change {name!r} needed?"


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_non_finite_gradient_norms_are_refused(place, tmp_path, norm):
    trainable = Run(place, tmp_path, "bf16").trainable
    for weight in trainable.model.parameters():
        weight.main_grad.fill_(norm)
    with pytest.raises(NonFiniteGradient):
        trainable.optimizer.step()


def test_every_change_of_the_optimizer_is_tried():
    here = "tests/engine/test_optimizer.py"
    assert [change.name for change in changes.CHANGES if change.test == here] == list(BREAKS)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_before_the_first_update_is_loaded(place, tmp_path, kind):
    """As when every step so far was skipped."""
    first = Run(place, tmp_path, kind)
    first.checkpoints.save(3, {})
    first.checkpoints.finish(wait=True)
    resumed = Run(place, tmp_path, kind).resumed()
    first.taken = resumed.taken
    assert torch.equal(resumed.train(2).weights(), first.train(2).weights())
