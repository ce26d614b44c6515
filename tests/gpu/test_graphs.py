"""Micro-batches captured as CUDA graphs leave the losses, gradients and weights of eager ones, bit for bit."""

import pytest
import torch

from megatron_blackmamba import layers, routers
from tests.gpu.graph_pieces import PIECES, work_of

pytestmark = pytest.mark.gpu
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

ONE_LAUNCH = "a micro-batch is one launch"
NO_Z_LOSS = ("hash",)
WAITS = ("attention",)  # within documents
LAYERS = ["model.attention.heads=4", "model.mlp_hidden_size=256"]
STEPS = 6
SHAPE = ["model.hidden_size=128", "model.expert_hidden_size=128", "model.vocab_size=512", "model.pattern=MEME"]
MORE = ["model.z_loss=0.02", "model.router.z_loss=0.03", "model.mtp.pattern=ME", "optimizer.clip=0.1"]


@pytest.fixture(scope="module")
def place():
    from megatron_blackmamba.config import ParallelConfig
    from megatron_blackmamba.runtime import world

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    yield world.start(ParallelConfig())
    world.shutdown()


def batch_of(number):
    random = torch.Generator().manual_seed(number)
    tokens_BS = torch.randint(512, (2, 64), generator=random)
    tokens_BS[tokens_BS < 32] = 0  # ends of documents
    return {
        "tokens": tokens_BS.pin_memory(),
        "labels": tokens_BS.roll(-1, 1).pin_memory(),
        "loss_mask": torch.ones(2, 64),
        "source_ids": torch.zeros(2, dtype=torch.int64),
        "sample_ids": torch.arange(2),
    }


def trained(place, folder, cuda_graph, kind, micro_batches, *words):
    """Return what each step found, the weights, and what the run tells of graphs."""
    from megatron_blackmamba.training.step.step import Step
    from tests.training.short_runs import Run

    settings = [*SHAPE, "data.sequence_length=64", f"training.global_batch={2 * micro_batches}", "model.eod_reset=0"]
    run = Run(place, folder, kind, *settings, f"kernels.cuda_graph={cuda_graph}", *words)
    told, found = [], []
    run.step = Step(run.config, place, run.trainable, 1, told.append)
    for step in range(STEPS):
        run.schedule.set(step)
        losses = run.step.gradients(iter([batch_of(step * micro_batches + place) for place in range(micro_batches)]))
        update = run.step.update()
        assert update.applied
        if step == 3:
            run.step.evaluate(iter([batch_of(999 + place) for place in range(micro_batches)]))
        found.append((losses.loss, losses.z_loss, losses.mtp_loss, losses.expert_tokens, update.grad_norm))
    return found, run.weights(), told


@pytest.mark.parametrize("name", PIECES)
def test_each_piece_is_captured_alone(name, place, tmp_path):
    from megatron_blackmamba.training.step.graphs import Side
    from tests.training.short_runs import Run

    run, side = Run(place, tmp_path, "bf16", *SHAPE, "data.sequence_length=64", "model.eod_reset=0"), Side()
    work = work_of(name, run.trainable.model, batch_of(0))
    work()  # as the first step does: it tries and compiles kernels
    found, problems = side.tried(work)
    assert not problems
    recorded = side.captured(work)
    recorded.replay()
    assert found.keys() == recorded.found.keys()
    assert [key for key, x in found.items() if not torch.equal(x, recorded.found[key])] == []


def test_failed_capture_gives_its_memory_back(place):
    from megatron_blackmamba.training.step.graphs import Side, _first_cause

    side, said = Side(), ""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    try:
        side.captured(lambda: {"sum": torch.ones(2**26, device="cuda").sum().item()})
    except RuntimeError as error:
        said = _first_cause(error)
    side.free(after_failure=True)
    assert "previous error" not in said and said
    assert torch.cuda.memory_reserved() <= before
    recorded = side.captured(lambda: {"ones": torch.ones(4, device="cuda")})
    recorded.replay()
    assert recorded.found["ones"].sum() == 4


def agree(place, folder, kind, micro_batches, *words):
    """Assert that a run with graphs trains as one without, and return what it told."""
    expected, weights, silent = trained(place, folder, "off", kind, micro_batches, *words)
    found, ours, told = trained(place, folder, "auto", kind, micro_batches, *words)
    assert not silent and len(told) == 1
    assert found == expected
    assert torch.equal(ours, weights)
    return told[0]


@pytest.mark.parametrize("router", ["sinkhorn", "quantile", "sinkhorn_bias"])
@pytest.mark.parametrize("kind, micro_batches", [("bf16", 1), ("bf16", 3), ("narrow", 1), ("narrow", 2)])
def test_graphs_train_as_eager_steps_do(kind, micro_batches, router, place, tmp_path):
    assert agree(place, tmp_path, kind, micro_batches, *MORE, f"model.router.kind={router}") == ONE_LAUNCH


@pytest.mark.parametrize("router", [kind.name for kind in routers.all_kinds()])
def test_graphs_train_with_every_router(router, place, tmp_path):
    words = [] if router in NO_Z_LOSS else ["model.router.z_loss=0.03"]
    assert agree(place, tmp_path, "bf16", 1, *words, f"model.router.kind={router}") == ONE_LAUNCH


@pytest.mark.parametrize("layer", layers.all_kinds(), ids=lambda layer: layer.name)
def test_graphs_train_with_every_layer(layer, place, tmp_path):
    told = agree(place, tmp_path, "bf16", 2, f"model.pattern=M{layer.letter}ME", *LAYERS)
    assert (told == ONE_LAUNCH) == (layer.name not in WAITS), told


def test_waits_are_found_before_a_capture(place, tmp_path):
    words = ["model.pattern=M*", "model.attention.heads=4", "model.attention.kv_heads=2"]
    expected, _, _ = trained(place, tmp_path, "off", "bf16", 1, *words)
    found, _, told = trained(place, tmp_path, "auto", "bf16", 1, *words)
    assert found == expected
    assert len(told) == 1 and "the host waits" in told[0] and "attention.py" in told[0]
