"""The Triton kernels of the SSD scan, interpreted, against the definition in float64: values and every gradient."""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tests.ops import test_mamba3
from tests.ops.implementations import assert_close
from tests.ops.test_ssd import ACTIVATIONS, OPTIONAL, problem, values_and_gradients
from tests.thorough import thorough

pytestmark = pytest.mark.xdist_group("triton")
FP32, BF16 = 2e-6, 8e-3


def results(tensors, reset, dtype=torch.float32, constants=()):
    """Return what the kernels compute, with other constants of the module if given."""
    from megatron_blackmamba.ops.ssd import triton

    with mock.patch.dict(vars(triton), constants):
        return values_and_gradients(tensors, reset, "triton", dtype)


def check(interpreted, inputs, tolerance=FP32, dtype=torch.float32, **constants):
    actual = interpreted(results, *inputs, dtype, constants)
    assert_close(actual, values_and_gradients(*inputs, "float64", dtype), tolerance)
    return actual


def test_everything_matches_float64_in_two_chunks(interpreted):
    check(interpreted, problem(B=1, L=70, H=4, P=5, G=2, N=7, reset="some"))


def test_sums_over_shares_of_heads_match_float64(interpreted):
    """Programs take some of five heads, the last one fewer."""
    check(interpreted, problem(B=1, L=20, H=5, P=16, G=1, N=16), heads_of_program=three, OUTPUT_HEADS=2)


def three(*_):
    return 3


@pytest.mark.parametrize(
    "shape",
    [
        {"L": 1, "H": 1, "G": 1, "without": OPTIONAL},
        pytest.param({"L": 64, "H": 2, "G": 2, "P": 16, "N": 16, "without": OPTIONAL}, marks=thorough),
        pytest.param({"L": 130, "H": 3, "G": 1, "P": 64, "N": 128, "reset": "some"}, marks=thorough),
        pytest.param({"L": 65, "H": 2, "G": 1, "P": 128, "N": 100, "reset": "all"}, marks=thorough),
        pytest.param({"L": 65, "H": 2, "G": 2, "P": 17, "N": 33, "reset": "last"}, marks=thorough),
        pytest.param({"L": 80, "H": 2, "G": 2, "P": 24, "N": 64, "reset": "first"}, marks=thorough),
    ],
    ids=str,
)
def test_odd_shapes_match_float64(interpreted, shape):
    check(interpreted, problem(B=1, **shape))


def test_bf16_agrees_within_its_rounding(interpreted):
    actual = check(interpreted, problem(B=1, L=100, H=2, P=16, G=1, N=16, reset="some"), BF16, torch.bfloat16)
    assert actual["y"].dtype == torch.bfloat16 and actual["final state"].dtype == torch.float32


@thorough
def test_reset_at_every_place_matches_float64(interpreted):
    tensors, _ = problem(B=18, L=18, H=1, P=4, G=1, N=4)
    check(interpreted, (tensors, torch.eye(18, dtype=torch.bool)), CHUNK=16)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=thorough)])
def test_extreme_decays_are_finite_and_right(interpreted, dtype):
    """A token that forgets everything stands beside tokens that forget next to nothing."""
    tensors, _ = problem(B=1, L=128, without=("dt_bias",))
    tensors["A"] = -torch.tensor([1e-4, 0.1, 1.0, 16.0, 1e3, 1e5])
    tensors["dt"] = torch.randn_like(tensors["dt"]) * torch.logspace(-3, 4, 128)[None, torch.randperm(128), None]
    actual = check(interpreted, (tensors, None), 1e-5 if dtype == torch.float32 else BF16, dtype)
    assert all(tensor.isfinite().all() for tensor in actual.values())


def test_small_decays_survive_behind_a_huge_one(interpreted):
    """Differences of fp32 running sums would be off by the rounding of the huge sum."""
    dt = torch.full((1, 64, 1), -4.0)
    dt[0, 0] = 1e6
    tensors = {"x": torch.ones(1, 64, 1, 1), "dt": dt, "A": torch.full((1,), -1.0)}
    tensors |= {"B": torch.ones(1, 64, 1, 1), "C": torch.ones(1, 64, 1, 1)}
    exact = values_and_gradients(tensors, None, "float64")["y"]
    torch.testing.assert_close(interpreted(results, tensors, None)["y"].double(), exact, rtol=4e-6, atol=0)


def sequence_first(tensors, reset):
    """Return the results of inputs that lie in memory as `[L, B]`, and whether the outputs do."""
    from megatron_blackmamba.ops.ssd import Inputs, triton

    x, dt, B, C = (tensors[name].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for name in ACTIVATIONS)
    y, end = triton.scan(Inputs(x, dt, tensors["A"], B, C, reset_BL=reset))
    grads = torch.autograd.grad((y, end), (x, dt, B, C), (torch.ones_like(y), torch.ones_like(end)))
    lies = [v.transpose(0, 1).is_contiguous() for v in (y, *grads)]
    values = [v.contiguous() for v in (y.detach(), end.detach(), *grads)]
    return dict(zip(("y", "end", *ACTIVATIONS), values, strict=True)), lies


def test_sequence_first_inputs_give_sequence_first_results(interpreted):
    tensors, reset = problem(B=2, L=20, H=2, P=4, G=1, N=4, without=OPTIONAL, reset="some")
    actual, lies = interpreted(sequence_first, tensors, reset)
    assert all(lies)
    from megatron_blackmamba.ops.ssd import Inputs, reference

    x, dt, B, C = (tensors[name].double().requires_grad_() for name in ACTIVATIONS)
    y, end = reference.scan(Inputs(x, dt, tensors["A"].double(), B, C, reset_BL=reset))
    grads = torch.autograd.grad((y, end), (x, dt, B, C), (torch.ones_like(y), torch.ones_like(end)))
    expected = dict(zip(("y", "end", *ACTIVATIONS), (y.detach(), end.detach(), *grads), strict=True))
    assert_close(actual, expected, FP32)


def ends(tensors, reset):
    from megatron_blackmamba.ops.ssd import Inputs, triton

    inputs = Inputs(*(tensors.get(name) for name in ("x", "dt", "A", "B", "C", "D", *OPTIONAL[1:])), reset)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        _, end = triton.scan(inputs._replace(x_BLHP=tensors["x"].requires_grad_()))
    return end.detach(), triton.final_state(inputs), set(kept) <= {x.data_ptr() for x in tensors.values()}


def test_final_state_needs_only_inputs_in_backward(interpreted):
    end, alone, only_inputs = interpreted(ends, *problem(B=1, L=70, H=2, P=4, G=1, N=4))
    assert torch.equal(end, alone) and only_inputs


def mamba3_results(tensors, reset):
    from megatron_blackmamba.ops.mamba3 import mamba3

    def scan(leaves, reset, memory):
        given = (leaves[name] for name in ("B", "C", "B_bias", "C_bias", "D"))
        rates, mix = test_mamba3.rates_of(leaves), leaves.get("mix")
        return mamba3(leaves["x"], rates, *given, mix_HRP=mix, memory=memory, reset_BL=reset, backend="triton")

    return test_mamba3.values_and_gradients(scan, tensors, reset, torch.float32, True)


@pytest.mark.parametrize("R", [1, pytest.param(4, marks=thorough)])
def test_mamba3_matches_its_recurrence(interpreted, R):
    inputs = test_mamba3.problem(B=1, L=70, H=2, G=1, reset="some", R=R)
    expected = test_mamba3.values_and_gradients(test_mamba3.defined, *inputs, torch.float64, True)
    assert_close(interpreted(mamba3_results, *inputs), expected, 1e-5)


def refusals(x):
    from megatron_blackmamba.ops import backends
    from megatron_blackmamba.ops.ssd import Inputs, triton

    def why_not(x_BLHP, N=4):
        B_BLGN = x_BLHP.new_ones(*x_BLHP.shape[:2], 1, N)
        inputs = Inputs(x_BLHP, x_BLHP[..., 0], -torch.ones(x_BLHP.shape[2]), B_BLGN, B_BLGN)
        return backends.unsupported(triton, inputs)

    return [why_not(x), why_not(x.double()), why_not(x, N=256), why_not(x[:, :0])]


def test_unsupported_calls_say_why(interpreted):
    fits, wide, large, empty = interpreted(refusals, torch.ones(1, 2, 1, 4))
    assert fits is None and "float64" in wide and "at most 128" in large and "empty" in empty
