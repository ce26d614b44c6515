"""The CUDA C++ scan, emulated on the CPU, against the definition in float64: values, gradients and missing barriers."""

import tempfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from megatron_blackmamba.ops import backends, nvrtc
from megatron_blackmamba.ops.selective_scan import Inputs, cuda, cuda_launch, reference
from tests.ops.emulated import Emulator, why_not
from tests.ops.test_triton_selective_scan import EVERYTHING, Neighbours, problem, results
from tests.thorough import thorough

pytestmark = [pytest.mark.xdist_group("triton"), pytest.mark.skipif(why_not() is not None, reason="needs g++")]
TOLERANCE = 6e-3  # bf16 outputs, and sums of dB and dC in TF32
WAITS = {"a barrier": "__syncthreads();", "a warp's barrier": "__syncwarp();", "a wait for copies": "wait_for_all"}


@cache
def folder():
    """Return where this process keeps what it compiles."""
    return tempfile.TemporaryDirectory(prefix="emulated")


def without(what, number, text):
    """Return the source without the given wait, counted from 0."""
    before, *after = text.split(what)
    assert number < len(after), f"{what} occurs {len(after)} times"
    lost = "if (false) " + what if what.startswith("wait") else ""
    return before + "".join((lost if i == number else what) + part for i, part in enumerate(after))


def cuda_results(inputs, options=None, order=0, early=False, planted=None, chain_end=None):
    """Results of the emulated scan, and the kernels that it launched."""
    change = partial(without, *planted) if planted else str
    emulator = Emulator(Path(folder().name), order, early, change)
    nvrtc.launch, launch = emulator.launch, nvrtc.launch
    B, L, I = inputs["u"].shape
    plan = replace(cuda.rule(B, L, I), **{"chunk": 8, "segment": 0, "backward_segment": 0} | (options or {}))
    chain = None if chain_end is None else Neighbours(inputs["start"], chain_end)

    def scan(given):
        if chain is None:
            return cuda.scan(given, plan)
        y, end = cuda.scan(given._replace(initial_state_BIN=None), plan, chain)
        return y, end.detach().requires_grad_()

    try:
        return results(scan, inputs), emulator.launched
    finally:
        nvrtc.launch = launch


def errors(actual, exact):
    """Return by how much each result is off, relative to its norm; NaN is off by infinity."""
    return {
        name: ((actual[name].double() - x).norm() / x.norm().clamp_min(1e-6)).nan_to_num(float("inf")).item()
        for name, x in exact.items()
    }


def cuda_results_of_log(inputs):
    """Results of the emulated scan, which is given log(-A)."""
    emulator = Emulator(Path(folder().name))
    nvrtc.launch, launch = emulator.launch, nvrtc.launch
    try:
        return results(partial(cuda.scan, log_A=True), inputs | {"A": (-inputs["A"]).log()})
    finally:
        nvrtc.launch = launch


def exact_results(inputs):
    return results(reference.scan, inputs, dtype=torch.float64)


@pytest.mark.parametrize(
    ("features", "shape", "options", "order", "early"),
    [
        (EVERYTHING, (2, 19, 128), {"channels": 2}, 2, False),
        (frozenset({"gate", "skip", "bias", "softplus"}), (1, 24, 256), {"channels": 1}, 1, True),
        pytest.param(EVERYTHING - {"gate"}, (1, 12, 128), {"channels": 1}, 0, False, marks=thorough),
        pytest.param(EVERYTHING - {"softplus", "bias"}, (1, 9, 128), {"channels": 2}, 1, True, marks=thorough),
        pytest.param(frozenset(), (1, 3, 128), {"channels": 1}, 2, True, marks=thorough),
    ],
)
def test_emulated_kernels_match_the_reference(interpreted, features, shape, options, order, early):
    inputs = problem(*shape, 16, features, dtype=torch.bfloat16)
    actual, launched = interpreted(cuda_results, inputs, options, order, early)
    exact = exact_results(inputs)
    assert max(errors(actual, exact).values()) < TOLERANCE and actual.keys() == exact.keys()
    assert launched == ["scan_forward", "scan_backward", "sum_of_blocks"]


def test_emulated_kernels_take_the_logarithm_of_decays(interpreted):
    inputs = problem(2, 7, 128, 16, EVERYTHING, dtype=torch.bfloat16)
    exact = exact_results(inputs)
    exact["dA"] *= inputs["A"].double()  # the gradient of the logarithm
    assert max(errors(interpreted(cuda_results_of_log, inputs), exact).values()) < TOLERANCE


def test_emulated_segments_match_one_pass(interpreted):
    inputs = problem(1, 19, 128, 16, EVERYTHING, dtype=torch.bfloat16)
    actual, _ = interpreted(cuda_results, inputs, {"channels": 2, "segment": 8, "backward_segment": 8})
    assert max(errors(actual, exact_results(inputs)).values()) < TOLERANCE


def test_emulated_part_of_a_sequence_matches_the_whole(interpreted):
    inputs = problem(2, 19, 128, 16, EVERYTHING, dtype=torch.bfloat16)
    exact = exact_results(inputs)
    g = torch.Generator().manual_seed(1)  # as `results` draws the gradients of both outputs
    _, grad_end = (torch.randn(x.shape, generator=g, dtype=torch.float64) for x in (exact["y"], exact["end"]))
    segments = {"channels": 2, "segment": 8, "backward_segment": 8}
    actual, _ = interpreted(cuda_results, inputs, segments, 0, False, None, grad_end.float())
    del exact["dstart"]
    assert max(errors(actual, exact).values()) < TOLERANCE


def test_rows_of_any_layout_are_read(interpreted):
    inputs = problem(2, 19, 128, 16, EVERYTHING, dtype=torch.bfloat16)
    exact = exact_results(inputs)
    for name in ("u", "z"):
        inputs[name] = inputs[name].transpose(0, 1).contiguous().transpose(0, 1)
    inputs["B"] = torch.cat((inputs["B"][..., :1], inputs["B"]), -1)[..., 1:]  # unaligned: it is copied
    actual, _ = interpreted(cuda_results, inputs, {"channels": 2})
    assert max(errors(actual, exact).values()) < TOLERANCE


UNSEEN = {("a warp's barrier", 1)}  # the matrix products before it wait for the warp too


def waits():
    """Yield the waits of the source whose absence an emulator can show; one of them belongs to `make test`."""
    text = cuda_launch.SOURCE.read_text()
    for name, what in WAITS.items():
        for number in range(text.count(what)):
            if (name, number) in UNSEEN:
                continue
            marks = () if (name, number) == ("a barrier", 1) else thorough
            yield pytest.param(what, number, id=f"{name} {number}", marks=marks)


@pytest.mark.parametrize(("what", "number"), waits())
def test_a_missing_wait_is_caught(interpreted, what, number):
    """Without it, in some order of the threads, a result is wrong."""
    inputs = problem(1, 24, 128, 16, frozenset({"gate", "skip", "bias", "softplus"}), dtype=torch.bfloat16)
    exact, worst = exact_results(inputs), 0.0
    for order in (0, 1, 2):
        for early in (False, True):
            actual, _ = interpreted(cuda_results, inputs, {"channels": 1}, order, early, (what, number))
            worst = max(worst, *errors(actual, exact).values())
            if worst > TOLERANCE:
                return
    pytest.fail(f"nothing shows that the wait is missing: at most {worst:.1e}")


def test_barrier_that_some_threads_skip_is_a_deadlock(interpreted):
    inputs = problem(1, 4, 128, 16, frozenset(), dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="wait for each other for ever"):
        interpreted(diverging_results, inputs)


def diverging_results(inputs):
    emulator = Emulator(
        Path(folder().name), change=lambda text: text.replace("__syncthreads();", "if (thread) __syncthreads();")
    )
    nvrtc.launch, launch = emulator.launch, nvrtc.launch
    try:
        return results(cuda.scan, inputs)
    finally:
        nvrtc.launch = launch


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "not on a CUDA device"),
        ({"u": torch.float32}, "takes bfloat16; the input is float32"),
        ({"C": torch.float32}, "takes bfloat16, C is torch.float32"),
    ],
)
def test_calls_it_cannot_take_are_left_to_triton(changes, reason):
    inputs = problem(1, 8, 128, 16, dtype=torch.bfloat16)
    inputs |= {name: inputs[name].to(dtype) for name, dtype in changes.items()}
    given = Inputs(*inputs.values())
    assert reason in backends.unsupported(cuda, given if not changes else OnGpu(given))


class OnGpu:
    """Inputs that say that they are on a GPU."""

    def __init__(self, inputs):
        self.__dict__ = inputs._asdict() | {"u_BLI": Claimed(inputs.u_BLI)}

    def __iter__(self):
        return iter(self.__dict__.values())


class Claimed:
    is_cuda = True

    def __init__(self, x):
        self.dtype, self.shape, self.numel = x.dtype, x.shape, x.numel


def test_a_structure_refuses_other_arguments():
    assert nvrtc.fields(cuda_launch.SOURCE, "SumOfBlocks") == ("parts", "dBC", "blocks", "tokens")
    with pytest.raises(TypeError, match="SumOfBlocks takes parts, dBC, blocks, tokens; not parts"):
        nvrtc.pack(cuda_launch.SOURCE, "SumOfBlocks", {"parts": None})


def test_sizes_are_read_from_the_source():
    assert (cuda_launch.WIDTH, cuda_launch.STATES, cuda_launch.STEP) == (128, 16, 4)
    gated = nvrtc.constants(cuda_launch.SOURCE, (("HAS_Z", 1), ("CHANNELS", 2)))
    plain = nvrtc.constants(cuda_launch.SOURCE, (("HAS_Z", 0), ("CHANNELS", 1)))
    assert (gated["FORWARD_THREADS"], plain["FORWARD_THREADS"]) == (64, 128)
    assert (gated["FORWARD_BYTES"], plain["FORWARD_BYTES"]) == (13_312, 9_216)  # stages of rows, and of B and C
    assert (gated["BACKWARD_BYTES"], plain["BACKWARD_BYTES"]) == (42_752, 36_608)


def test_plans_cut_sequences_only_where_few_come():
    assert cuda.rule(18, 2048, 2304).segment == 0
    assert cuda.rule(42, 2048, 2304).channels == 2
    alone = cuda.rule(1, 2048, 2304)
    assert 0 < alone.segment < 2048 and 0 < alone.backward_segment < 2048


def test_kernels_compile_without_spills_and_are_modelled():
    pytest.importorskip("cuda.bindings.nvrtc")
    from benchmarks import triton_resources, warp_model

    kernels = {(k.name, k.constants["CHANNELS"]): k for k in triton_resources.cuda_kernels(90)}
    assert max(k.spilled_bytes for k in kernels.values()) <= 8  # by one compiler, none by the others
    backward, forward = kernels["scan_backward", 1], kernels["scan_forward", 2]
    assert backward.registers <= 255 and forward.registers <= 168  # two blocks of 128 threads, six of 64
    body = warp_model.main_loop(forward.code)
    alone, three = (warp_model.cycles(body, warps, loops=2)[0] / (warps * 128) for warps in (1, 3))
    exponentials = triton_resources.issue_slots(forward)[1]
    assert exponentials <= three < alone  # no schedule beats the special functions, and warps hide each other's waits
