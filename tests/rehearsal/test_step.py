"""A training step on fake GPUs: no crash, no unexpected wait, few launches, memory as planned."""

from collections import Counter

import pytest

from benchmarks.rehearsal.requirements import why_not
from megatron_blackmamba.config import load
from megatron_blackmamba.engine import changes
from megatron_blackmamba.layers import kind_of, kinds_in
from megatron_blackmamba.plan import gpus, memory, times
from tests.rehearsal.cases import CASES
from tests.runtime.ranks import run_script
from tests.thorough import selected, unless

pytestmark = [
    pytest.mark.xdist_group("rehearsal"),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]

A_STEP = Counter(
    {
        "copy from pageable memory: step._over_the_world": 1,
        "copy to the host: step._over_the_world": 1,
        "item: update.step": 1,
    }
)
AN_EXPERTS_LAYER = {  # and micro-batch, by dispatcher
    "alltoall": {"synchronize: token_dispatcher._maybe_dtoh_and_synchronize": 1},  # the split sizes
    "allgather": {
        "copy to the host: token_dispatcher.dispatch_postprocess": 1,
        "copy from pageable memory: __init__.grouped_experts": 1,
        "masked_select: moe_utils.permute": 1,
        "masked_select: token_dispatcher.dispatch_postprocess": 1,
    },
}
LAUNCHES = {"M": (19, 62), "E": (62, 93), "*": (31, 31), "-": (9, 23), "G": (330, 380), "S": (12, 42), "R": (95, 290)}
"""Bounds of launches forward and backward by letter; other kinds have OTHERS."""
OF_PARTS = 20
"""More launches each way with parallel.context and model.eod_reset."""
IN_PYTORCH = {"R", "G"}
"""Layers whose scan is PyTorch's operations here, with products in fp32."""
ROUNDINGS = 4
"""More launches each way, of a layer whose two products take both factors in FP8."""
OTHERS = (64, 400)
EVERYDAY = ("ep8", "pp2", "hybrid_cp2")


@pytest.fixture(scope="module")
def recorded(request):
    return run_script("tests.rehearsal.probe", *selected(request, "step"))


@pytest.fixture(params=unless(EVERYDAY, CASES))
def step(request, recorded):
    found = recorded[request.param]
    assert "error" not in found, found["error"]
    return found | {"name": request.param, "case": CASES[request.param]}


def config_of(step):
    return load(step["case"].config, step["case"].overrides)


def test_no_stand_in_for_cuda_is_installed(step):
    for_gpus_too = {change.name for change in changes.CHANGES if change.needed is not changes.without_cuda}
    assert set(step["patches"]) <= for_gpus_too


def test_the_host_waits_only_where_expected(step):
    assert step["waits"] == expected_waits(config_of(step), step)


def expected_waits(config, step):
    waits = A_STEP.copy()
    if step["case"].ranks > 1:
        waits["synchronize: stragglers.take"] += 1
    experts = sum(kind_of(letter).routed for letter in step["layers"]) * step["micro_batches"]
    if config.parallel.expert * config.parallel.expert_tensor > 1:
        for name, count in AN_EXPERTS_LAYER[config.kernels.dispatcher].items():
            waits[name] += count * experts
        if config.model.router.kind == "softmax":  # megatron-core's own router returns a map
            waits["masked_select: moe_utils.permute"] += 2 * experts
    if config.model.eod_reset is not None and "*" in step["layers"]:
        waits["tolist: attention.documents_of"] += step["micro_batches"]
    if config.training.precision == "fp32":  # which grouped products do not take
        waits["tolist: loop.grouped_linear"] += 2 * experts
    return waits


def test_launches_of_a_layer_stay_under_their_bound(step):
    for letter, found in step["launches"].items():
        forward, backward = LAUNCHES.get(letter, OTHERS)
        if config_of(step).kernels.linear == "fp8":
            forward, backward = forward + ROUNDINGS, backward + ROUNDINGS
        if config_of(step).parallel.context > 1:
            forward, backward = forward + OF_PARTS, backward + OF_PARTS
        if letter == "*" and config_of(step).model.eod_reset is not None:  # blocks attend twice
            backward += OF_PARTS
        repeated = forward if config_of(step).training.recompute == "layers" else 0
        assert found["forward"] <= forward, letter
        assert found["backward"] <= backward + repeated, letter


def test_peak_memory_is_within_5_percent_of_plan(step):
    # The plan does not count the tokens that the all-gather dispatcher gathers from other ranks.
    rel = 0.08 if step["name"] == "ep8_allgather" else 0.05
    full = memory.of_stage(config_of(step), step["case"].ranks, stage=0)  # where rank 0 is
    assert step["peak"] == pytest.approx(full.total - full.reserved, rel=rel)


def test_gradients_are_overwritten_not_set_to_zero(step):
    state = memory.state_of(config_of(step), step["case"].ranks, 0)
    assert step["zeroed"] < 0.01 * state.gradients


def test_plan_expects_the_rehearsed_time(step):
    config = config_of(step)
    ranks, gpu = step["case"].ranks, gpus.KNOWN["h200"]
    state, batch = memory.state_of(config, ranks, 0), times.of_stages(config, gpu)[0]
    planned = times.of_micro_batches(config, ranks, batch, gpu, state) + times.of_update(config, gpu, state)
    assert planned == pytest.approx(sum(step["seconds"].values()), rel=0.15), step["seconds"]


def test_no_product_is_fp32_and_nothing_fp64(step):
    if config_of(step).training.precision == "bf16" and not IN_PYTORCH & set(step["layers"]):
        assert not [what for what in step["odd"] if "fp32" in what]
    assert not [what for what in step["odd"] if "fp64" in what or "CPU" in what or "cpu" in what]


def test_mamba_layers_run_the_fast_kernels(step):
    if "M" in step["layers"]:
        kernels = config_of(step).kernels
        in_cuda = config_of(step).training.precision == "bf16" and kernels.scan_states == "keep"
        scan = {"scan_forward", "scan_backward", "sum_of_blocks"} if in_cuda else {"forward", "backward"}
        assert {*scan, "convolve_forward", "convolve_backward"} <= set(step["kernels"])
    assert {"norm_forward", "norm_backward"} <= set(step["kernels"])
    if any(kind.routed for kind in kinds_in(step["layers"])) and config_of(step).model.router.kind == "sinkhorn":
        assert "_choose" in step["kernels"]
