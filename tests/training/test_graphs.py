"""Captured micro-batches leave the same losses and gradients, and the same notes in Python, as those of the schedule.

CPUs have no CUDA graphs, so `Stand-in` takes the place of one: recording changes no tensor, a replay changes nothing
but tensors. tests/gpu/test_graphs.py has the real ones.
"""

import copy
from unittest import mock

import pytest
import torch

from megatron_blackmamba.engine.parts.accumulation import Accumulation
from megatron_blackmamba.training.step import graphs
from tests.model.conftest import place
from tests.training.short_runs import KINDS, Run

pytestmark = pytest.mark.xdist_group("short_runs")
__all__ = ["place"]
LOSSES = ["model.z_loss=0.02", "model.router.z_loss=0.03", "model.mtp.pattern=ME", "model.eod_reset=0"]


def tensors_of(run):
    grads = [weight.main_grad for weight in run.trainable.model.parameters()]
    return [*grads, *run.trainable.model.buffers()]


def stand_in_for(run):
    class StandIn:
        """Stands for a CUDA graph."""

        def __init__(self, work, pool):
            config = run.trainable.reduced.config
            self.work = work
            self.scaled = {name: getattr(config, name) for name in ("grad_scale_func", "finalize_model_grads_func")}
            self.outdated = run.trainable.reduced.outdated.copy()
            before = [x.clone() for x in tensors_of(run)]
            self.found = {name: x.clone() for name, x in work().items()}
            for x, value in zip(tensors_of(run), before, strict=True):
                x.data.copy_(value)

        def replay(self):
            reduced, seen = run.trainable.reduced, run.step.first_seen
            notes = reduced.outdated.copy(), copy.copy(seen.losses), copy.copy(seen.gradients)
            reduced.outdated = self.outdated.copy()
            with mock.patch.multiple(reduced.config, **self.scaled):
                found = self.work()
            reduced.outdated, seen.losses, seen.gradients = notes
            for name, x in self.found.items():
                x.copy_(found[name])

    return StandIn


def trained(place, folder, monkeypatch, captured, micro_batches, *words):
    """Return what four steps find, the last gradients, the weights, and what was told of graphs."""
    run = Run(place, folder, "bf16", f"training.global_batch={2 * micro_batches}", *LOSSES, *words)
    told = []
    if captured:
        run.step.graphs = graphs.Graphs(run.config, 1, run.trainable.reduced, told.append)
        run.step.graphs.wanted, run.step.graphs._steps = True, graphs.EAGER
        monkeypatch.setattr(graphs, "Recorded", stand_in_for(run))
        monkeypatch.setattr(graphs, "new_pool", object)
    found = []
    for _ in range(4):
        run.schedule.set(run.taken)
        batches = []
        for _ in range(micro_batches):
            run.taken += 1
            batches += run.batches()
        losses = run.step.gradients(iter(batches))
        noted = {number: float(x) for number, x in run.step.first_seen.gradients.items()}
        assert noted.keys() == run.step.first_seen.losses.keys() == set(range(micro_batches))
        found.append((losses.loss, losses.z_loss, losses.mtp_loss, losses.expert_tokens, noted))
        grads = [weight.main_grad.clone() for weight in run.trainable.model.parameters()]
        assert run.step.update().applied
    return found, grads, run, told


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_replayed_steps_equal_the_schedules(micro_batches, place, tmp_path, monkeypatch):
    expected, grads, run, _ = trained(place, tmp_path, monkeypatch, False, micro_batches)
    found, ours, replayed, told = trained(place, tmp_path, monkeypatch, True, micro_batches)
    assert found == expected
    assert all(torch.equal(one, other) for one, other in zip(ours, grads, strict=True))
    assert torch.equal(replayed.weights(), run.weights())
    assert len(replayed.step.graphs.captured) == min(2, micro_batches) and told == ["a micro-batch is one launch"]


def test_failed_capture_goes_on_without_graphs(place, tmp_path, monkeypatch):
    expected, *_ = trained(place, tmp_path, monkeypatch, False, 2)
    real = stand_in_for

    def failing(run):
        class Failing(real(run)):
            def __init__(self, work, pool):
                super().__init__(work, pool)
                raise torch.OutOfMemoryError("no memory")

        return Failing

    monkeypatch.setitem(globals(), "stand_in_for", failing)
    found, _, run, told = trained(place, tmp_path, monkeypatch, True, 2)
    assert found == expected and not run.step.graphs.wanted
    assert len(told) == 1 and "memory does not suffice" in told[0]


def node_of(weight):
    """Return autograd's node that adds the weight's gradient: the one that is alive, or a new one."""
    return weight.expand_as(weight).grad_fn.next_functions[0][0]


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_node_outlives_its_step(kind, place, tmp_path, monkeypatch):
    """A kept node adds on the stream on which it was made; a capture on another one fails."""
    monkeypatch.setattr(Accumulation, "_adds_directly", lambda self: False)  # as on GPUs
    run = Run(place, tmp_path, kind, "training.ema=0.9", *LOSSES)
    weights, alive = dict(run.trainable.model.named_parameters()), []

    def mark(*inputs):
        alive[:] = [node_of(weight) for weight in weights.values()]
        for node in alive:
            node.metadata["marked"] = True

    run.trainable.model.register_forward_pre_hook(mark)
    run.trainable.model.register_forward_hook(lambda *unused: alive.clear())
    run.train(2)
    assert [name for name, weight in weights.items() if "marked" in node_of(weight).metadata] == []


def test_validation_frees_the_graphs(place, tmp_path, monkeypatch):
    _, _, run, _ = trained(place, tmp_path, monkeypatch, True, 1)
    assert run.step.graphs.captured
    run.step.evaluate(run.batches())
    assert not run.step.graphs.captured


def test_cpus_capture_nothing(place, tmp_path):
    run = Run(place, tmp_path, "bf16").train(4)
    assert not run.step.graphs.wanted and not run.step.graphs.captured


@pytest.mark.parametrize(
    "words, processes, reason", [((), 2, "process"), (("training.recompute=layers",), 1, "recompute"), ((), 1, "")]
)
def test_runs_that_cannot_be_captured_say_why(words, processes, reason):
    from megatron_blackmamba.config import load

    why = graphs.why_not(load("tiny", list(words)), processes)
    assert reason in why and bool(why) == bool(reason)
