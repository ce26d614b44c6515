"""Captured micro-batches leave the same losses and gradients, and the same notes in Python, as those of the schedule.

CPUs have no CUDA graphs, so `Stand-in` takes the place of one: recording changes no tensor, a replay changes nothing
but tensors. tests/gpu/test_graphs.py has the real ones.
"""

import copy
import gc
from unittest import mock

import pytest
import torch

from megatron_blackmamba import layers, routers
from megatron_blackmamba.engine.parts.accumulation import Accumulation
from megatron_blackmamba.ops.fp32_linear import fp32_linear
from megatron_blackmamba.runtime import layout
from megatron_blackmamba.training.step import graphs
from tests.gpu import graph_pieces
from tests.model.conftest import place
from tests.training.short_runs import KINDS, Run

pytestmark = pytest.mark.xdist_group("short_runs")
__all__ = ["place"]
WIDE = "model.hidden_size=128 model.mlp_hidden_size=16 model.attention.heads=4"
OTHERS = [f"model.pattern={kind.letter}E {WIDE}" for kind in layers.all_kinds()]
OTHERS += ["model.mtp.pattern=ME", "model.router.kind=softmax kernels.dispatcher=allgather", "model.latent_size=8"]
LOSSES = ["model.z_loss=0.02", "model.router.z_loss=0.03", "model.mtp.pattern=ME", "model.eod_reset=0"]


def tensors_of(run):
    grads = [weight.main_grad for weight in run.trainable.model.parameters()]
    return [*grads, *run.trainable.model.buffers()]


def stand_in_for(run):
    class StandIn:
        """Stands for a stream that captures."""

        freed = 0

        def tried(self, work):
            return work(), []

        def captured(self, work):
            reduced, seen, config = run.trainable.reduced, run.step.first_seen, run.trainable.reduced.config
            scaled = {name: getattr(config, name) for name in ("grad_scale_func", "finalize_model_grads_func")}
            outdated, before = reduced.outdated.copy(), [x.clone() for x in tensors_of(run)]
            found = {name: x.clone() for name, x in work().items()}
            for x, value in zip(tensors_of(run), before, strict=True):
                x.data.copy_(value)

            def replay():
                notes = reduced.outdated.copy(), copy.copy(seen.losses), copy.copy(seen.gradients)
                reduced.outdated = outdated.copy()
                with mock.patch.multiple(config, **scaled):
                    again = work()
                reduced.outdated, seen.losses, seen.gradients = notes
                for name, x in found.items():
                    x.copy_(again[name])

            return graphs.Recorded(replay, found)

        def free(self, after_failure=False):
            self.freed += 1

    return StandIn


def trained(place, folder, monkeypatch, captured, micro_batches, *words):
    """Return what four steps find, the last gradients, the weights, and what was told of graphs."""
    run = Run(place, folder, "bf16", f"training.global_batch={2 * micro_batches}", *LOSSES, *words)
    told = []
    if captured:
        run.step.graphs = graphs.Graphs(run.config, 1, run.trainable.reduced, told.append)
        run.step.graphs.wanted = True
        monkeypatch.setattr(graphs, "Side", stand_in_for(run))
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


@pytest.mark.parametrize("words", [*(f"model.router.kind={kind.name}" for kind in routers.all_kinds()), *OTHERS])
def test_no_graph_of_gradients_outlives_a_step(words, place, tmp_path):
    gc.collect()
    before = graphs_alive()
    run = Run(place, tmp_path, "bf16", *words.split())
    run.step.gradients(run.batches())
    assert graphs_alive() <= before


def graphs_alive():
    """Return the tensors whose autograd graph is kept by something, by their places."""
    return {id(x) for x in gc.get_objects() if isinstance(x, torch.Tensor) and has_graph(x)}


def has_graph(x):
    try:
        return x.grad_fn is not None
    except RuntimeError:  # a view that another test has left, and that has none any more
        return False


def test_failed_capture_goes_on_without_graphs(place, tmp_path, monkeypatch):
    expected, *_ = trained(place, tmp_path, monkeypatch, False, 2)
    real = stand_in_for

    def failing(run):
        class Failing(real(run)):
            def captured(self, work):
                super().captured(work)
                try:
                    raise torch.OutOfMemoryError("no memory")
                finally:
                    raise RuntimeError("the end of the capture fails, too")

        return Failing

    monkeypatch.setitem(globals(), "stand_in_for", failing)
    found, _, run, told = trained(place, tmp_path, monkeypatch, True, 2)
    assert found == expected and not run.step.graphs.wanted
    assert len(told) == 1 and "memory does not suffice" in told[0]
    assert run.step.graphs._side.freed


def test_what_a_try_reports_is_not_captured(place, tmp_path, monkeypatch):
    expected, *_ = trained(place, tmp_path, monkeypatch, False, 1)
    real = stand_in_for

    def refused(run):
        return type("Refused", (real(run),), {"tried": lambda self, work: (work(), ["the host waits in a test"])})

    monkeypatch.setitem(globals(), "stand_in_for", refused)
    found, _, run, told = trained(place, tmp_path, monkeypatch, True, 1)
    assert found == expected and not run.step.graphs.captured
    assert len(told) == 1 and "the host waits in a test" in told[0]


def test_first_cause_of_a_failure_is_named():
    def capture():
        try:
            try:
                {}["nothing"]
            except KeyError:
                fp32_linear(torch.ones(2, 3), torch.ones(4, 5), None, torch.float32)
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(RuntimeError) as failed:
        capture()
    said = graphs._first_cause(failed.value)
    assert "previous error" not in said and "fp32_linear.py" in said, said


class Allocator:
    """A stand-in for how PyTorch 2.11 treats the memory of captures, as its source has it."""

    def __init__(self, monkeypatch, ends_failed):
        self.captures, self.uses, self.segments, self.ends_failed = set(), {}, set(), ends_failed
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"segment_pool_id": p} for p in self.segments])
        monkeypatch.setattr(torch.cuda.memory, "_cuda_endAllocateToPool", lambda device, pool: self.end(pool))
        monkeypatch.setattr(torch.cuda.memory, "_cuda_releasePool", lambda device, pool: self.leave(pool))

    def fail(self, pool):
        self.segments.add(pool)
        self.uses[pool] = 1
        self.captures.add(pool)
        if self.ends_failed:
            self.end(pool)
            self.leave(pool)

    def end(self, pool):
        if pool not in self.captures:
            raise RuntimeError("not currently recording to this pool")
        self.captures.remove(pool)

    def leave(self, pool):
        self.uses[pool] -= 1
        assert self.uses[pool] >= 0

    def empty(self):
        if not self.captures:
            self.segments -= {pool for pool, count in self.uses.items() if not count}


@pytest.mark.parametrize("ends_failed", [False, True])
def test_memory_of_a_failed_capture_is_freed(ends_failed, monkeypatch):
    """PyTorch 2.11 itself keeps it; newer releases do not."""
    allocator, side = Allocator(monkeypatch, ends_failed), graphs.Side.__new__(graphs.Side)
    side.pool = (0, 1)
    allocator.fail(side.pool)
    side.free(after_failure=True)
    assert not allocator.captures and not allocator.segments and side.pool is None


@pytest.mark.parametrize("name", graph_pieces.PIECES)
def test_pieces_for_gpus_have_gradients_here(name, place, tmp_path):
    run = Run(place, tmp_path, "bf16", "model.eod_reset=0", "data.sequence_length=64")
    tokens_BS = torch.randint(32, (graph_pieces.B, graph_pieces.S))
    found = graph_pieces.work_of(name, run.trainable.model, {"tokens": tokens_BS, "labels": tokens_BS})()
    assert len(found) > 1 and all(x.isfinite().all() for x in found.values())


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

    why = layout.why_no_graph(load("tiny", list(words)), processes)
    assert reason in why and bool(why) == bool(reason)
