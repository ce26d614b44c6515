import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_blackmamba.ops.ssd import available_backends, chunked, ssd, ssd_step
from tests.ops.implementations import PROPERTY, assert_close
from tests.ops.test_selective_scan import resets

ACTIVATIONS = ("x", "dt", "B", "C")
OPTIONAL = ("D", "dt_bias", "initial_state")


def problem(B=2, L=150, H=6, P=5, G=2, N=7, without=(), reset=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = {"x": (B, L, H, P), "dt": (B, L, H), "A": (H,), "B": (B, L, G, N), "C": (B, L, G, N), "D": (H,)}
    shapes |= {"dt_bias": (H,), "initial_state": (B, H, P, N)}
    tensors = {name: torch.randn(shape, generator=g) for name, shape in shapes.items() if name not in without}
    tensors["A"] = -torch.exp(tensors["A"])
    return tensors, resets(reset, B, L, g)


def call(tensors, reset, backend="chunked"):
    return ssd(
        *(tensors.get(name) for name in ("x", "dt", "A", "B", "C", "D")),
        dt_bias_H=tensors.get("dt_bias"),
        initial_state_BHPN=tensors.get("initial_state"),
        reset_BL=reset,
        return_final_state=True,
        backend=backend,
    )


def values_and_gradients(tensors, reset, backend, dtype=torch.float32):
    """Activations in `dtype`, the rest in fp32; or all in float64 by the reference, from the same rounded numbers."""
    exact = backend == "float64"
    leaves = {}
    for key, tensor in tensors.items():
        tensor = tensor.to(dtype) if key in ACTIVATIONS else tensor
        leaves[key] = (tensor.double() if exact else tensor).detach().clone().requires_grad_()
    y, state = call(leaves, reset, "reference" if exact else backend)
    g = torch.Generator().manual_seed(1)
    weight_y = torch.randn(y.shape, generator=g).to(dtype).to(y.dtype)
    torch.autograd.backward((y, state), (weight_y, torch.randn(state.shape, generator=g).to(state.dtype)))
    gradients = {f"gradient of {key}": leaf.grad for key, leaf in leaves.items()}
    return {"y": y.detach(), "final state": state.detach(), **gradients}


@PROPERTY
@given(
    B=st.integers(1, 3),
    L=st.one_of(st.just(1), st.integers(1, 200)),
    groups=st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)]),
    P=st.integers(1, 9),
    N=st.integers(1, 17),
    without=st.sets(st.sampled_from(OPTIONAL)),
    reset=st.sampled_from([None, "first", "last", "some", "all"]),
    seed=st.integers(0, 2**20),
)
def test_agrees_with_float64_in_values_and_gradients(B, L, groups, P, N, without, reset, seed):
    inputs = problem(B, L, groups[0], P, groups[1], N, without, reset, seed)
    assert_close(values_and_gradients(*inputs, "chunked"), values_and_gradients(*inputs, "float64"), tolerance=1e-5)


@pytest.fixture(params=["_sums_from_each", "_differences_of_sums"])
def sums(request, monkeypatch):
    """Sum decays as on a GPU, and as on a CPU."""
    monkeypatch.setattr(chunked, "_sums_between", getattr(chunked, request.param))


@pytest.mark.usefixtures("sums")
@pytest.mark.parametrize("reset", [None, "some"])
def test_chunks_of_one_segment_agree_with_float64(reset, monkeypatch):
    monkeypatch.setitem(chunked.DECAYS, "cpu", 3 * 2 * 6 * chunked.CHUNK**2)  # three chunks a segment
    inputs = problem(L=9 * chunked.CHUNK + 5, reset=reset)
    assert len(chunked._segments(chunked.Inputs(*(inputs[0][name] for name in ("x", "dt", "A", "B", "C"))))) == 4
    assert_close(values_and_gradients(*inputs, "chunked"), values_and_gradients(*inputs, "float64"), tolerance=1e-5)


@pytest.mark.parametrize("reset", [None, "some"])
def test_bf16_activations_keep_an_fp32_state(reset):
    inputs = problem(reset=reset)
    actual = values_and_gradients(*inputs, "chunked", torch.bfloat16)
    expected = values_and_gradients(*inputs, "float64", torch.bfloat16)
    assert actual["y"].dtype == torch.bfloat16 and actual["final state"].dtype == torch.float32
    assert_close(actual, expected, tolerance=4e-3)  # one rounding to bf16 is 2e-3
    assert_close({"h": actual["final state"]}, {"h": expected["final state"]}, tolerance=1e-5)


def test_float64_stays_float64():
    tensors, reset = problem(reset="some")
    inputs = {key: tensor.double() for key, tensor in tensors.items()}, reset
    actual = values_and_gradients(*inputs, "chunked", torch.float64)
    assert {value.dtype for value in actual.values()} == {torch.float64}
    assert_close(actual, values_and_gradients(*inputs, "float64", torch.float64), tolerance=1e-12)
    assert call(*inputs, backend="auto")[1].dtype == torch.float64


@pytest.mark.usefixtures("sums")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decays_of_any_size_are_finite_and_right(dtype):
    """A token that forgets everything stands beside tokens that forget next to nothing.

    In two of a hundred draws, the gradient of A cancels so far that the recurrence in fp32 also exceeds the tolerance.
    """
    tensors, _ = problem(L=128, without=("dt_bias",))
    tensors["A"] = -torch.tensor([1e-4, 0.1, 1.0, 16.0, 1e3, 1e5])
    tensors["dt"] = torch.randn_like(tensors["dt"]) * torch.logspace(-3, 4, 128)[None, torch.randperm(128), None]
    expected = values_and_gradients(tensors, None, "float64", dtype)
    actual = values_and_gradients(tensors, None, "chunked", dtype)
    assert all(tensor.isfinite().all() for tensor in actual.values())
    assert_close(actual, expected, tolerance=1e-5 if dtype == torch.float32 else 4e-3)


@pytest.mark.usefixtures("sums")
def test_small_decays_survive_behind_a_huge_one():
    """Differences of fp32 running sums would be off by the rounding of the huge sum."""
    dt = torch.full((1, 64, 1), -4.0)
    dt[0, 0] = 1e6
    tensors = {"x": torch.ones(1, 64, 1, 1), "dt": dt, "A": torch.full((1,), -1.0)}
    tensors |= {"B": torch.ones(1, 64, 1, 1), "C": torch.ones(1, 64, 1, 1)}
    exact, _ = call({key: tensor.double() for key, tensor in tensors.items()}, None, "reference")
    torch.testing.assert_close(call(tensors, None)[0].double(), exact, rtol=1e-6, atol=0)


def test_memory_of_many_tokens_does_not_drift():
    L, H = 16_384, 4
    dt = math.log(math.expm1(1e-4)) + 0.3 * torch.randn(1, L, H, generator=torch.Generator().manual_seed(0))
    A, start = -torch.tensor([0.1, 0.5, 1.0, 2.0]), torch.ones(1, H, 1, 2)
    zero, x = torch.zeros(1, L, 1, 2), torch.zeros(1, L, H, 1)
    _, state = call({"x": x, "dt": dt, "A": A, "B": zero, "C": zero, "initial_state": start}, None)
    exact = torch.exp(torch.nn.functional.softplus(dt.double()).sum((0, 1)) * A.double())
    torch.testing.assert_close(state[0, :, 0, 0].double(), exact, rtol=2e-5, atol=0)


@pytest.mark.parametrize("broken", ACTIVATIONS)
def test_nan_stays_visible_and_never_travels_back(broken):
    tensors, _ = problem(L=100)
    tensors[broken][0, 70] = math.nan
    y, _ = call(tensors, None)
    assert y[0, 70].isnan().all()
    assert not y[0, :64].isnan().any() and not y[1].isnan().any()


@pytest.mark.parametrize("at", [0, 1, 63, 64, 65, 99])
def test_nothing_crosses_a_reset(at):
    tensors, _ = problem(B=1, L=100)
    reset = torch.zeros(1, 100, dtype=torch.bool)
    reset[0, at] = True
    leaves = {key: tensor.clone().requires_grad_() for key, tensor in tensors.items()}
    alone = {key: t[:, at:] if key in ACTIVATIONS else t for key, t in tensors.items() if key != "initial_state"}
    y, state = call(leaves, reset)
    y_alone, state_alone = call(alone, None)
    torch.testing.assert_close(y[:, at:], y_alone)
    torch.testing.assert_close(state, state_alone)
    (y[:, at:].sum() + state.sum()).backward()
    for key in ACTIVATIONS:
        assert not leaves[key].grad[:, :at].abs().gt(1e-12).any(), key  # of dt, sums that cancel in float64
    assert not leaves["initial_state"].grad.any()


@pytest.mark.parametrize("cut", [1, 64, 90])
def test_two_parts_through_the_state_are_one_sequence(cut):
    def in_parts(tensors, reset):
        first, second = ({key: tensors[key] for key in tensors} for _ in range(2))
        for key in ACTIVATIONS:
            first[key], second[key] = tensors[key][:, :cut], tensors[key][:, cut:]
        y1, second["initial_state"] = call(first, reset[:, :cut])
        y2, state = call(second, reset[:, cut:])
        return torch.cat((y1, y2), dim=1), state

    tensors, reset = problem(reset="some", seed=3)
    results = []
    for scan in (call, in_parts):
        leaves = {key: tensor.clone().requires_grad_() for key, tensor in tensors.items()}
        y, state = scan(leaves, reset)
        (y.square().sum() + state.square().sum()).backward()
        results.append({"y": y.detach(), "state": state.detach()} | {key: leaf.grad for key, leaf in leaves.items()})
    assert_close(results[1], results[0], tolerance=1e-5)


@pytest.mark.parametrize("without", [(), OPTIONAL[:2]])
def test_steps_match_the_whole_scan(without):
    tensors, _ = problem(L=12, without=without)
    y, final_state = call(tensors, None)
    state = tensors["initial_state"].clone()
    for t in range(12):
        x, dt, B, C = (tensors[key][:, t] for key in ACTIVATIONS)
        y_t = ssd_step(state, x, dt, tensors["A"], B, C, tensors.get("D"), tensors.get("dt_bias"))
        torch.testing.assert_close(y_t, y[:, t], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, final_state)


def test_no_tokens_leave_the_state():
    tensors, _ = problem(L=0)
    found = values_and_gradients(tensors, None, "chunked")
    for name, expected in values_and_gradients(tensors, None, "reference").items():
        if name in ("y", "final state", "gradient of initial_state"):
            assert torch.equal(found[name], expected)


def test_sequence_first_inputs_give_sequence_first_outputs():
    tensors, _ = problem(B=3)
    expected = values_and_gradients(tensors, None, "chunked")
    strided = {key: x.transpose(0, 1).contiguous().transpose(0, 1) if key in ACTIVATIONS else x
               for key, x in tensors.items()}  # fmt: skip
    y, state = call(strided, None)
    assert y.transpose(0, 1).is_contiguous()
    torch.testing.assert_close(y, expected["y"])
    torch.testing.assert_close(state, expected["final state"])


def test_backward_keeps_only_the_inputs():
    tensors, _ = problem()
    leaves = {key: tensor.requires_grad_() for key, tensor in tensors.items()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        call(leaves, None)
    assert {x.data_ptr() for x in kept} <= {x.data_ptr() for x in leaves.values()}


def test_best_backend_that_can_is_chosen():
    tensors, _ = problem(L=3)
    assert torch.equal(call(tensors, None, "auto")[0], call(tensors, None)[0])
    assert set(available_backends()) == {"triton", "mamba_ssm", "chunked", "reference"}
    assert available_backends()["chunked"] is None and available_backends()["reference"] is None


def test_wrong_calls_are_refused_by_name():
    tensors, reset = problem()
    with pytest.raises(ValueError, match=r"backend must be one of auto.*'fast'"):
        call(tensors, reset, "fast")
    with pytest.raises(ValueError, match=r"C has shape \(2, 150, 2, 3\), expected \(2, 150, 2, 7\)"):
        call(tensors | {"C": tensors["C"][..., :3]}, reset)
    with pytest.raises(ValueError, match="6 heads in 4 groups"):
        call(tensors | {key: torch.zeros(2, 150, 4, 7) for key in ("B", "C")}, reset)
    with pytest.raises(ValueError, match="reset must be a bool tensor"):
        call(tensors, torch.zeros(2, 150))
    with pytest.raises(ValueError, match="ssd: dt is int64"):
        call(tensors | {"dt": tensors["dt"].long()}, reset)


def test_final_state_holds_no_other_chunks():
    tensors, _ = problem(B=1, L=4 * chunked.CHUNK, H=1, G=1)
    _, state = call(tensors, None)
    assert state.untyped_storage().nbytes() == state.nbytes
