"""The Triton kernels of the delta rule, interpreted, against the definition in float64: values and every gradient."""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from megatron_blackmamba.ops.delta import triton
from tests.ops.implementations import assert_close
from tests.ops.interpreted import last_program_first
from tests.ops.test_delta import TOKENS, problem, values_and_gradients
from tests.thorough import thorough

pytestmark = pytest.mark.xdist_group("triton")
FP32, BF16 = 1e-6, 4e-3
BOTH = pytest.mark.parametrize("by_channel", [False, True], ids=["one decay", "by channel"])


def test_triton_that_cannot_compile_one_decay_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert triton.unavailable() is None
    monkeypatch.setattr(triton.triton, "__version__", "3.5.1")
    assert triton.unavailable() == "needs Triton 3.6 or newer, found 3.5.1"


def results(tensors, reset, dtype=torch.float32, segment=None):
    """Return what the kernels compute, in segments of some tokens if given."""
    from megatron_blackmamba.ops.delta import chunked

    numbers = chunked.NUMBERS["cpu"] if segment is None else segment * tensors["k"][:, 0].numel()
    with mock.patch.dict(chunked.NUMBERS, cpu=numbers):
        return values_and_gradients(tensors, reset, "triton", dtype)


def check(interpreted, inputs, tolerance=FP32, dtype=torch.float32, **options):
    actual = interpreted(results, *inputs, dtype, *options.values())
    assert_close(actual, values_and_gradients(*inputs, "float64", dtype), tolerance)
    return actual


@BOTH
def test_everything_matches_float64_in_two_chunks(interpreted, by_channel):
    check(interpreted, problem(B=1, L=70, H=2, K=8, V=5, by_channel=by_channel, reset="some"))


@BOTH
@pytest.mark.parametrize(
    "shape",
    [
        {"L": 1, "H": 1, "state": False},
        {"L": 33, "H": 1, "K": 70, "V": 20, "reset": "last"},
        pytest.param({"L": 64, "H": 2, "K": 16, "V": 16, "reset": "first"}, marks=thorough),
        pytest.param({"L": 130, "H": 1, "K": 128, "V": 33, "reset": "some"}, marks=thorough),
        pytest.param({"L": 129, "H": 1, "K": 17, "V": 200, "state": False}, marks=thorough),
        pytest.param({"L": 65, "H": 3, "K": 100, "V": 1, "reset": "all"}, marks=thorough),
    ],
    ids=str,
)
def test_odd_shapes_match_float64(interpreted, by_channel, shape):
    check(interpreted, problem(B=1, by_channel=by_channel, **shape))


@pytest.mark.parametrize("by_channel", [pytest.param(False, marks=thorough), True])
def test_segments_match_float64(interpreted, by_channel):
    check(interpreted, problem(B=1, L=150, H=1, K=4, V=3, by_channel=by_channel, reset="some"), segment=64)


@BOTH
def test_bf16_agrees_within_its_rounding(interpreted, by_channel):
    inputs = problem(B=1, L=70, H=1, by_channel=by_channel, reset="some")
    actual = check(interpreted, inputs, BF16, torch.bfloat16)
    assert actual["y"].dtype == actual["gradient of k"].dtype == torch.bfloat16
    assert actual["state"].dtype == torch.float32


@thorough
@BOTH
def test_reset_at_every_place_matches_float64(interpreted, by_channel):
    tensors, _ = problem(B=12, L=67, H=1, K=3, V=2, by_channel=by_channel)
    reset = torch.zeros(12, 67, dtype=torch.bool)
    reset[range(12), [0, 1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 66]] = True
    check(interpreted, (tensors, reset))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=thorough)])
def test_extreme_decays_are_finite_and_right(interpreted, dtype, by_channel):
    """Tokens that forget everything, in one channel or all, beside tokens that forget next to nothing."""
    tensors, _ = problem(B=1, L=66, H=2, by_channel=by_channel)
    g = torch.Generator().manual_seed(2)
    decay = tensors["log_decay"]
    decay *= 10.0 ** torch.randint(-5, 6, decay.shape, generator=g)
    decay[:, 40, 0] = decay[:, 41] = -torch.inf
    actual = check(interpreted, (tensors, None), FP32 if dtype == torch.float32 else BF16, dtype)
    assert all(tensor.isfinite().all() for tensor in actual.values())


@BOTH
def test_small_decays_survive_beside_a_huge_one(interpreted, by_channel):
    """Differences of fp32 running sums would be off by the rounding of the huge sum. Nothing is erased."""
    tensors, _ = problem(B=1, L=64, H=1, K=4, V=1, by_channel=by_channel, state=False)
    tensors |= {name: torch.ones_like(tensors[name]) for name in ("q", "k", "written")}
    tensors["erase"], tensors["log_decay"] = torch.zeros_like(tensors["erase"]), tensors["log_decay"] * 0 - 1e-2
    tensors["log_decay"][:, 20] = -170.0
    exact = values_and_gradients(tensors, None, "float64")["y"]
    torch.testing.assert_close(interpreted(results, tensors, None)["y"].double(), exact, rtol=2e-6, atol=0)


@BOTH
def test_repeated_keys_do_not_lose_digits(interpreted, by_channel):
    """Powers of this system's matrix reach 1e18, so an inverse that added them would be noise."""
    tensors, _ = problem(B=1, L=64, H=1, K=4, V=3, by_channel=by_channel)
    tensors["k"] = tensors["k"][:, :1].expand(-1, 64, -1, -1).clone()
    tensors["erase"], tensors["log_decay"] = tensors["k"].clone(), torch.zeros_like(tensors["log_decay"])
    check(interpreted, (tensors, None), 5e-6)


def sequence_first(tensors, reset):
    """Return the results of inputs that lie in memory as `[L, B]`, and whether the outputs do."""
    from megatron_blackmamba.ops.delta import Inputs, triton

    tokens = [tensors[name].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for name in TOKENS]
    y, end = triton.scan(Inputs(*tokens, None, reset))
    grads = torch.autograd.grad((y, end), tokens, (torch.ones_like(y), torch.ones_like(end)))
    values = [v.contiguous() for v in (y.detach(), end.detach(), *grads)]
    return values, [v.transpose(0, 1).is_contiguous() for v in (y, *grads)]


def test_sequence_first_inputs_give_sequence_first_results(interpreted):
    from megatron_blackmamba.ops.delta import Inputs, reference

    tensors, reset = problem(B=2, L=20, H=1, K=4, V=3, state=False, reset="some")
    actual, lies = interpreted(sequence_first, tensors, reset)
    tokens = [tensors[name].double().requires_grad_() for name in TOKENS]
    y, end = reference.scan(Inputs(*tokens, None, reset))
    expected = y.detach(), end.detach(), *torch.autograd.grad((y.sum(), end.sum()), tokens)
    names = ("y", "end", *TOKENS)
    assert_close(dict(zip(names, actual, strict=True)), dict(zip(names, expected, strict=True)), FP32)
    assert all(lies)


def two_orders(tensors, reset):
    """Return the results of programs from the first to the last, and from the last to the first."""
    forwards = results(tensors, reset)
    with pytest.MonkeyPatch.context() as patch:
        last_program_first(patch)
        return forwards, results(tensors, reset)


@pytest.mark.parametrize("by_channel", [False, pytest.param(True, marks=thorough)])
def test_order_of_programs_changes_no_bit(interpreted, by_channel):
    inputs = problem(B=1, L=66, H=1, K=33, V=33, by_channel=by_channel, reset="some")
    first, second = interpreted(two_orders, *inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def unused(tensors, reset):
    """Return the gradients where only the state is used, and where only y is."""
    from megatron_blackmamba.ops.delta import Inputs, triton

    tokens = [tensors[name].requires_grad_() for name in TOKENS]
    y, end = triton.scan(Inputs(*tokens, None, reset))
    return [torch.autograd.grad(x.sum(), tokens, retain_graph=True) for x in (end, y)]


def test_unused_outputs_have_zero_gradients(interpreted):
    from megatron_blackmamba.ops.delta import Inputs, reference

    tensors, reset = problem(B=1, L=20, H=1, K=4, V=3, state=False)
    actual = interpreted(unused, tensors, reset)
    tokens = [tensors[name].double().requires_grad_() for name in TOKENS]
    for x, found in zip(reversed(reference.scan(Inputs(*tokens))), actual, strict=True):
        expected = torch.autograd.grad(x.sum(), tokens, retain_graph=True, allow_unused=True)
        expected = [torch.zeros_like(t) if grad is None else grad for t, grad in zip(tokens, expected, strict=True)]
        assert_close(dict(zip(TOKENS, found, strict=True)), dict(zip(TOKENS, expected, strict=True)), FP32)


def refusals(x):
    from megatron_blackmamba.ops import backends
    from megatron_blackmamba.ops.delta import Inputs, delta, triton

    def why_not(x_BLHK):
        return backends.unsupported(triton, Inputs(x_BLHK, x_BLHK, x_BLHK, x_BLHK, x_BLHK[..., :1]))

    chosen = backends.choose("megatron_blackmamba.ops.delta", ("chunked", "triton"), "auto", Inputs(*5 * [x])).__name__
    assert delta(*5 * [-x], backend="triton")[0].shape == x.shape
    return [why_not(x), why_not(x.double()), why_not(x.expand(-1, -1, -1, 129)), why_not(x[:, :0])], chosen


def test_unsupported_calls_say_why(interpreted):
    (fits, wide, large, empty), chosen = interpreted(refusals, torch.ones(1, 2, 1, 1))
    assert fits is None and "float64" in wide and "at most 128" in large and "empty" in empty
    assert chosen.endswith("chunked")  # the kernels are unmeasured: named, or not used
