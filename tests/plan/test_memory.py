from dataclasses import asdict

import pytest

from megatron_blackmamba import layers
from megatron_blackmamba.config import load
from megatron_blackmamba.plan import flops, memory, times
from megatron_blackmamba.plan.activations import Activations
from megatron_blackmamba.plan.gpus import KNOWN
from tests.plan.memory_probe import ONE_OF_EACH, cases
from tests.runtime.ranks import fork_script
from tests.thorough import selected, unless

pytestmark = pytest.mark.xdist_group("plan_memory")  # its processes start once, not once a worker


EVERYDAY = (
    "tiny",
    "wide_ep2",
    "deep_tp2",
    "cp2",
    "layers",
    "whole_optimizer",
    "bf16_gradients",
    "ema",
    "parallel_layers",
)
EVERYDAY += ("free_cp2", "many_heads", "many_heads_mimo", "relu2")
EVERYDAY += (
    "delta",
    "delta_gdn2_tp2",
    "mamba2_tp2",
    "mimo_tp2",
    "hybrid_cp2",
    "norms_tp2",
    "ahead_tp2",
    "nemotron",
    "expert_bias_ep2",
)


BYTES = ("weights", "gradients", "optimizer", "expert_weights", "expert_gradients")


@pytest.fixture(scope="module")
def measured(request):
    """Name -> what each rank really held after a step."""
    found = fork_script("tests.plan.memory_probe", *selected(request))
    errors = [rank for ranks in found.values() for rank in ranks if "error" in rank]
    assert not errors, errors[0]
    return {name: [rank["answer"] for rank in ranks] for name, ranks in found.items()}


@pytest.mark.parametrize("name", unless(EVERYDAY, cases()))
def test_model_and_optimizer_bytes_are_predicted_exactly(measured, name):
    ranks, overrides = cases()[name]
    config = load("tiny", overrides)
    for rank, held in enumerate(measured[name]):
        predicted = memory.state_of(config, ranks, rank)
        assert asdict(predicted) == asdict(predicted) | {part: held[part] for part in BYTES}


@pytest.mark.parametrize("name", unless(EVERYDAY, [name for name in cases() if "float64" not in name]))  # no plan
def test_saved_activations_are_predicted_within_5_percent(measured, name):
    """The plan leaves out small tensors and uneven loads of experts."""
    config = load("tiny", cases()[name][1])
    predicted = memory.kept(config, 0, config.training.recompute, "cpu") + Activations(config, "cpu").logits()
    for held in measured[name]:
        assert predicted == pytest.approx(held["kept"], rel=0.05)


CLOSE = {"cp2": 0.01, "mamba2_cp2": 0.01, "hybrid_cp2": 0.01, "free_cp2": 0.005}
CLOSE |= {"many_heads": 0.002, "many_heads_mimo": 0.002}


@pytest.mark.parametrize("name", unless([name for name in CLOSE if name != "mamba2_cp2"], [*CLOSE]))
def test_each_number_of_a_layer_is_predicted(measured, name):
    """Of context parallelism, of attention without rotation, and of Mamba-3 with heads of two channels."""
    config = load("tiny", cases()[name][1])
    predicted = memory.kept(config, 0, "none", "cpu") + Activations(config, "cpu").logits()
    assert predicted == pytest.approx(measured[name][0]["kept"], rel=CLOSE[name])


@pytest.mark.parametrize("kind", layers.all_kinds(), ids=lambda kind: kind.name)
def test_flops_of_every_kind_are_those_torch_counts(measured, kind):
    """Torch counts matrix products; Mamba's scan and convolution are none."""
    config = load("tiny", ONE_OF_EACH[kind.letter])
    parts = flops.forward_by_part(config.model, config.data.sequence_length)
    products = sum(count for part, count in parts.items() if part not in kind.costs.elementwise)
    assert config.data.sequence_length * products == measured["flops"][0][kind.letter]


def test_recomputation_of_more_parts_keeps_less():
    config = load("blackmamba_1.5b", ["kernels.scan_states=recompute"])
    none, experts, layers = (memory.kept(config, 0, how, "cuda") for how in ("none", "experts", "layers"))
    assert none > 1.5 * experts > 3 * layers
    with_states = memory.kept(load("blackmamba_1.5b"), 0, "none", "cuda")
    assert with_states == pytest.approx(none + 15 * 18 * 42.5e6, rel=0.01)  # of 15 scans and 18 sequences


def test_first_stage_holds_one_micro_batch_per_stage():
    config = load("blackmamba_2.8b", ["parallel.pipeline=4", "training.micro_batch=1"])
    assert [memory.in_flight(config, 64, stage) for stage in range(4)] == [4, 3, 2, 1]
    few = load("tiny", ["parallel.pipeline=4", "training.global_batch=2", "training.micro_batch=1"])
    assert memory.in_flight(few, 4, 0) == 2  # no more than there are


def test_large_vocabulary_makes_the_last_stage_fullest():
    config = load("tiny", ["parallel.pipeline=2", "model.vocab_size=65536", "training.micro_batch=1"])
    full, rank = memory.fullest(config, 2)
    assert rank == 1
    assert full.logits > full.activations
    state = full.state.weights + full.state.gradients + full.state.optimizer
    assert full.total == state + sum(getattr(full, part) for part in vars(full) if part != "state")


def test_last_stage_alone_pays_for_the_extra_depth():
    halves = ["parallel.pipeline=2", "model.tie_embeddings=false"]
    without, ahead = (load("tiny", [*halves, *more]) for more in ([], ["model.mtp.pattern=ME"]))
    assert memory.of_stage(ahead, 2, 0) == memory.of_stage(without, 2, 0)
    assert memory.kept(ahead, 1, "none", "cuda") > memory.kept(without, 1, "none", "cuda")
    one, whole = (load("tiny", ["model.tie_embeddings=false", *more]) for more in ([], ["model.mtp.pattern=ME"]))
    depth = memory.state_of(whole, 1, 0).weights - memory.state_of(one, 1, 0).weights
    added = memory.state_of(ahead, 2, 1).weights - memory.state_of(without, 2, 1).weights
    assert added == depth + 4 * one.model.vocab_size * one.model.hidden_size  # a copy of the embedding
    stages = [times.of_stages(config, KNOWN["h100"]) for config in (without, ahead)]
    assert stages[1][0] == stages[0][0] and stages[1][1].total > stages[0][1].total


def test_expert_parallelism_divides_expert_memory():
    one, *spread = (memory.state_of(load("tiny", [f"parallel.expert={n}"]), 8, 0).weights for n in (1, 2, 4, 8))
    model = load("tiny").model
    expert = 3 * model.hidden_size * model.expert_hidden_size * 4
    experts = model.pattern.count("E") * model.experts * expert
    assert [one - held for held in spread] == [experts // 2, experts * 3 // 4, experts * 7 // 8]
