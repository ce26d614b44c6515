"""Every Triton kernel compiles for the GPUs we support, without one, and keeps its state in registers."""

import re

import pytest

pytest.importorskip("triton")

from benchmarks.triton_resources import OPERATIONS, issue_slots, kernels_of, scan_launches
from megatron_blackmamba.ops.triton_support import older_than
from tests.thorough import thorough

pytestmark = pytest.mark.xdist_group("triton")
DELTA = {
    *("weigh", "meet", "solve", "carry_states", "read_outputs"),
    *("of_outputs", "carry_gradients", "of_values", "of_states", "of_met"),
}
KERNELS = {
    "selective_scan": {"segment_ends", "forward", "chunk_parts", "carry", "backward", "add_up"},
    "selective_scan, recomputed": {"segment_ends", "forward", "chunk_parts", "carry", "backward", "add_up"},
    "ssd": {"sum_steps", "pass_states", "outputs", "of_heads", "of_groups"},
    "delta": DELTA,
    "delta, by channel": DELTA,
    "causal_conv1d": {"convolve_forward", "convolve_backward", "add_up"},
    "sinkhorn": {"_find_offsets", "_choose"},
    "sinkhorn, large": {"_sum_columns", "_choose"},
    "order": {"count_pairs", "place_pairs"},
    "gated": {"gate_forward", "gate_backward"},
    "norm": {"norm_forward", "norm_backward"},
    "gated norm": {"gated_norm_forward", "gated_norm_backward"},
    "cross_entropy": {"loss_and_gradient"},
    "adam": {"adam_update"},
    "fp8": {"round_rows"},
    "decoding, one": {"embed", "mamba_in_one", "mamba_scan", "add_product_one", "gated_in_one"},
    "decoding, 64": {
        *("embed", "mamba_in_rows", "sum_parts", "mamba_scan_rows", "add_product_rows"),
        *("route", "gated_in_rows", "add_expert_rows"),
    },
}
FROM_HOPPER_ON = ("fp8", "ssd", "delta", "delta, by channel")
"""Compiled for sm_90 alone: older GPUs have no FP8, and registers of `ssd` and `delta` are counted there only."""
TILES = ("_rows", "pass_states", "outputs", "of_heads", "of_groups", *DELTA)
SPILLED = {("forward", 90): 16, ("of_heads", 90): 64}
"""Bytes that a kernel stores outside its loop, for registers that its loop needs; all others store none."""

SHARED = {"gated_norm_backward": 16384}
"""Bytes of kernels whose rows lie at different distances, so that threads load different numbers of each."""
SHARED_BY_TILES = 160 * 1024
"""Bytes of an A100, of which kernels that multiply tiles hold several in flight."""


@pytest.fixture(scope="module", params=[pytest.param(80, marks=thorough, id="sm_80"), pytest.param(90, id="sm_90")])
def kernels(request):
    names = [name for name in OPERATIONS if request.param >= 90 or name not in FROM_HOPPER_ON]
    names = [name for name in names if name != "delta" or not older_than((3, 6))]  # refused there
    return {name: kernels_of(OPERATIONS[name], request.param) for name in names}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_kernel_spills_at_the_paper_s_shape(kernels, operation):
    if operation not in kernels:
        return
    assert {kernel.name for kernel in kernels[operation]} == KERNELS[operation]
    for kernel in kernels[operation]:
        spilled = SPILLED.get((kernel.name, kernel.arch), 0)
        assert kernel.spilled_bytes <= spilled, f"{kernel.name} spills {kernel.spilled_bytes} bytes on sm_{kernel.arch}"
        assert kernel.loop.count("LDL", "STL") == 0, f"{kernel.name} spills in its loop on sm_{kernel.arch}"
        shared = SHARED_BY_TILES if kernel.name.endswith(TILES) else SHARED.get(kernel.name, 8192)
        assert kernel.shared_bytes <= shared, kernel.name


@pytest.mark.parametrize("operation", ["ssd", "delta", "delta, by channel"])
def test_scans_of_matrices_have_no_atomics(kernels, operation):
    for kernel in kernels.get(operation, []):
        assert not re.search(r"\s(RED|ATOM\w*)\.", kernel.code), kernel.name


POINTER = re.compile(r"(%\S+) = (?:tt\.(?:addptr|splat|broadcast|expand_dims|bitcast)|ttg\.convert_layout) (%[\w#]+)")
ACCESS = re.compile(r"(?:(tt\.load)|(tt\.store)) (%[\w#]+)|(?:gpu|ttg)\.barrier")


def stored_unordered(ttgir):
    """Return the arguments that a kernel loads and then stores without a barrier of its program between."""
    origin, loaded, found = {}, set(), set()
    for line in ttgir.splitlines():
        if pointer := POINTER.search(line):
            origin[pointer[1]] = origin.get(pointer[2], pointer[2])
        elif access := ACCESS.search(line):
            load, store, at = access.groups()
            if load:
                loaded.add(origin.get(at, at))
            elif store:
                found |= {origin.get(at, at)} & loaded
            else:
                loaded.clear()
    return found


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name.startswith("decoding")])
def test_decoding_loads_everything_before_it_overwrites(kernels, operation):
    """Several threads load the same elements of a small tile and one stores them: barriers must be between."""
    for kernel in kernels[operation]:
        own = {"%stream_O", "%stream_BO", "%stream_BD"} if kernel.name.startswith("add_") else set()
        assert stored_unordered(kernel.ttgir) <= own, kernel.name  # each thread adds to the elements that it stores


WEIGHTS = {
    *("in_proj", "conv_IK", "conv_bias_I", "x_proj", "dt_proj", "dt_bias_I", "A_IN", "D_I", "weight", "norm_D"),
    *("router_ED", "router_bias_E", "choice_bias_E", "fc1_EGD"),
}


def test_overlapping_kernels_wait_before_they_use_activations(monkeypatch):
    from megatron_blackmamba.ops.decoding import triton as triton_decoding

    monkeypatch.setattr(triton_decoding.Launch, "__init__", lambda self, *_, **__: setattr(self, "overlap", True))
    for kernel in kernels_of(OPERATIONS["decoding, one"], 90):
        early, waits, _ = kernel.ttgir.partition("griddepcontrol.wait")
        assert waits and "tt.store" not in early, kernel.name
        origin = {}
        for line in early.splitlines():
            if pointer := POINTER.search(line):
                origin[pointer[1]] = origin.get(pointer[2], pointer[2])
            elif access := ACCESS.search(line):
                assert origin.get(access[3], access[3])[1:] in WEIGHTS, f"{kernel.name}: {line}"


def by_name(kernels):
    return {kernel.name: kernel for kernel in kernels["selective_scan"]}


def test_the_forward_scan_is_bound_by_its_exponentials(kernels):
    """A scheduler issues one instruction a cycle and an exponential takes the unit eight."""
    forward = by_name(kernels)["forward"]
    assert forward.loop.instructions <= 8.1 * forward.loop.count("MUFU")
    states = forward.constants["STEPS"] * forward.constants["N"]
    assert forward.loop.count("MUFU") == states + 4 * forward.constants["STEPS"]  # softplus and gate take two each
    assert forward.loop.count("SHFL", "LDS", "STS", "BAR") == 0  # a thread owns its channels


def test_backward_scan_fits_eight_warps_without_atomics(kernels):
    for kernel in by_name(kernels).values():
        assert kernel.loop.count("RED", "ATOM") == 0
    backward = by_name(kernels)["backward"]
    assert backward.registers * 32 * 8 <= 65536
    states = backward.constants["STEPS"] * backward.constants["N"]
    assert backward.loop.instructions <= 27.6 * states
    assert backward.loop.count("SHFL") <= 2.5 * states


def test_resets_cost_the_forward_scan_few_instructions():
    plain, resetting = (
        next(
            kernel for kernel in kernels_of(scan_launches, 90, reset=reset, backward=False) if kernel.name == "forward"
        )
        for reset in (False, True)
    )
    assert resetting.loop.count("LDL", "STL") == 0
    assert 0 < resetting.loop.instructions - plain.loop.instructions <= 10 * plain.constants["STEPS"]


def test_router_loop_needs_no_memory_or_other_warps(kernels):
    """One processor does it all, so a pass over the tokens takes as long as this loop's instructions."""
    found = {kernel.name: kernel for kernel in kernels["sinkhorn"]}["_find_offsets"]
    assert found.loop.count("LDL", "STL", "LDS", "STS", "BAR", "RED", "ATOM") == 0
    instructions, exponentials = issue_slots(found)
    assert exponentials <= 10 and instructions <= 12
    assert found.loop.count("LDG.E.128") == found.loop.count("LDG") > 0
