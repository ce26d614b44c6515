import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_blackmamba.ops.selective_scan import available_backends, selective_scan, selective_scan_step
from tests.ops.implementations import CPP, ISAS, PROPERTY, assert_close, implementation

IMPLEMENTATIONS = ["chunked", *CPP]
OPTIONAL = ("D", "z", "delta_bias", "initial_state")


def scan_inputs(B=2, L=40, I=19, N=16, without=(), softplus=True, reset=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = {"u": (B, L, I), "delta": (B, L, I), "A": (I, N), "B": (B, L, N), "C": (B, L, N)}
    shapes |= {"D": (I,), "z": (B, L, I), "delta_bias": (I,), "initial_state": (B, I, N)}
    tensors = {name: torch.randn(shape, generator=g) for name, shape in shapes.items() if name not in without}
    tensors["A"] = -torch.exp(tensors["A"])
    if not softplus:
        least = tensors["delta_bias"].min() if "delta_bias" in tensors else torch.zeros(())
        tensors["delta"] = tensors["delta"].abs() - least.clamp_max(0)  # the state grows without end in a negative step
    return tensors, {"delta_softplus": softplus, "reset_BL": resets(reset, B, L, g)}


def resets(where, B, L, generator):
    if where is None:
        return None
    reset_BL = torch.rand(B, L, generator=generator) < {"some": 0.2, "all": 1.0}.get(where, 0.0)
    if where == "first":
        reset_BL[:, 0] = True
    if where == "last":
        reset_BL[:, -1] = True
    return reset_BL


def call(tensors, options, backend):
    required = [tensors[name] for name in ("u", "delta", "A", "B", "C")]
    optional = {"z_BLI": "z", "delta_bias_I": "delta_bias", "initial_state_BIN": "initial_state"}
    keywords = {keyword: tensors.get(name) for keyword, name in optional.items()}
    return selective_scan(*required, tensors.get("D"), **keywords, **options, return_final_state=True, backend=backend)


def values_and_gradients(tensors, options, name, dtype=torch.float32):
    """Activations in `dtype`, the rest in fp32; or all in float64 by the reference, from the same rounded numbers."""
    exact = name == "float64"
    leaves = {}
    for key, tensor in tensors.items():
        if key in ("u", "delta", "B", "C", "z"):
            tensor = tensor.to(dtype)
        leaves[key] = (tensor.double() if exact else tensor).detach().clone().requires_grad_()
    with implementation("reference" if exact else name) as backend:
        y, state = call(leaves, options, backend)
        g = torch.Generator().manual_seed(1)
        weight_y = torch.randn(y.shape, generator=g).to(dtype).to(y.dtype)
        weight_state = torch.randn(state.shape, generator=g).to(state.dtype)
        torch.autograd.backward((y, state), (weight_y, weight_state))
    gradients = {f"gradient of {key}": leaf.grad for key, leaf in leaves.items()}
    return {"y": y.detach(), "final state": state.detach(), **gradients}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@PROPERTY
@given(
    B=st.integers(1, 3),
    L=st.one_of(st.just(1), st.integers(1, 70)),
    I=st.one_of(st.integers(1, 40), st.sampled_from([128, 145])),
    N=st.one_of(st.just(16), st.integers(1, 64)),
    without=st.sets(st.sampled_from(OPTIONAL)),
    softplus=st.booleans(),
    reset=st.sampled_from([None, "first", "last", "some", "all"]),
    seed=st.integers(0, 2**20),
)
def test_agrees_with_float64_in_values_and_all_gradients(name, B, L, I, N, without, softplus, reset, seed):
    inputs = scan_inputs(B, L, I, N, without, softplus, reset, seed)
    assert_close(values_and_gradients(*inputs, name), values_and_gradients(*inputs, "float64"), tolerance=1e-5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("reset", [None, "some"])
def test_bf16_activations_keep_an_fp32_state(name, reset):
    inputs = scan_inputs(L=100, I=35, reset=reset)
    actual = values_and_gradients(*inputs, name, torch.bfloat16)
    expected = values_and_gradients(*inputs, "float64", torch.bfloat16)
    assert actual["y"].dtype == torch.bfloat16 and actual["final state"].dtype == torch.float32
    assert_close(actual, expected, tolerance=4e-3)  # one rounding to bf16 is 2e-3
    assert_close({"h": actual["final state"]}, {"h": expected["final state"]}, tolerance=1e-5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_long_memory_does_not_drift(name):
    L, N = 4096, 4
    delta = 1e-3 * (0.5 + torch.rand(1, L, 1, generator=torch.Generator().manual_seed(0)))
    A, zero, start = -torch.tensor([[0.1, 0.5, 1.0, 2.0]]), torch.zeros(1, L, N), torch.ones(1, 1, N)
    tensors = {"u": delta, "delta": delta, "A": A, "B": zero, "C": zero, "initial_state": start}
    with implementation(name) as backend:
        _, state = call(tensors, {"delta_softplus": False}, backend)
    torch.testing.assert_close(state[0].double(), torch.exp(delta.double().sum() * A.double()), rtol=2e-5, atol=0)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_steps_of_any_size_are_finite_and_right(name):
    tensors, options = scan_inputs(L=20, I=16)
    tensors["delta"] *= torch.logspace(-6, 4, 20)[None, :, None]
    tensors["z"] *= torch.logspace(-6, 2.5, 20)[None, :, None]
    expected = values_and_gradients(tensors, options, "float64")
    assert_close(values_and_gradients(tensors, options, name), expected, tolerance=1e-5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("broken", ["u", "delta", "z", "B", "C"])
def test_a_nan_stays_visible(name, broken):
    tensors, options = scan_inputs(L=20)
    tensors[broken][0, 7] = math.nan
    with implementation(name) as backend:
        y, _ = call(tensors, options, backend)
    assert y[0, 7].isnan().all()
    assert not y[0, :7].isnan().any() and not y[1].isnan().any()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("at", [0, 1, 15, 16, 17, 39])
def test_nothing_crosses_a_reset(name, at):
    tensors, options = scan_inputs(B=1, L=40)
    options["reset_BL"] = torch.zeros(1, 40, dtype=torch.bool)
    options["reset_BL"][0, at] = True
    leaves = {key: tensor.clone().requires_grad_() for key, tensor in tensors.items()}
    alone = {key: t[:, at:] if key in ("u", "delta", "B", "C", "z") else t for key, t in tensors.items()}
    del alone["initial_state"]
    with implementation(name) as backend:
        y, state = call(leaves, options, backend)
        y_alone, state_alone = call(alone, {}, backend)
    torch.testing.assert_close(y[:, at:], y_alone)
    torch.testing.assert_close(state, state_alone)
    (y[:, at:].sum() + state.sum()).backward()
    for key in ("u", "delta", "B", "C", "z"):
        assert not leaves[key].grad[:, :at].any(), key
    assert not leaves["initial_state"].grad.any()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("cut", [1, 16, 23])
def test_two_parts_through_the_state_are_one_sequence(name, cut):
    def in_parts(tensors, options, backend):
        first, second = dict(tensors), dict(tensors)
        for key in ("u", "delta", "B", "C", "z"):
            first[key], second[key] = tensors[key][:, :cut], tensors[key][:, cut:]
        reset = options["reset_BL"]
        y1, second["initial_state"] = call(first, options | {"reset_BL": reset[:, :cut]}, backend)
        y2, state = call(second, options | {"reset_BL": reset[:, cut:]}, backend)
        return torch.cat((y1, y2), dim=1), state

    tensors, options = scan_inputs(reset="some", seed=3)
    results = []
    for scan in (call, in_parts):
        leaves = {key: tensor.clone().requires_grad_() for key, tensor in tensors.items()}
        with implementation(name) as backend:
            y, state = scan(leaves, options, backend)
            (y.square().sum() + state.square().sum()).backward()
        results.append({"y": y.detach(), "state": state.detach()} | {key: leaf.grad for key, leaf in leaves.items()})
    assert_close(results[1], results[0], tolerance=1e-6)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("without", [(), OPTIONAL[:3]])
def test_steps_match_the_whole_scan(name, without):
    tensors, options = scan_inputs(L=12, without=without)
    with implementation(name) as backend:
        y, final_state = call(tensors, options, backend)
    state = tensors["initial_state"].clone()
    for t in range(12):
        u, delta, B, C = (tensors[key][:, t] for key in ("u", "delta", "B", "C"))
        z = tensors["z"][:, t] if "z" in tensors else None
        y_t = selective_scan_step(
            state, u, delta, tensors["A"], B, C, tensors.get("D"), z, tensors.get("delta_bias"), True
        )
        torch.testing.assert_close(y_t, y[:, t], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, final_state)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_sequence_first_halves_of_projection_need_no_copy(name):
    tensors, options = scan_inputs(B=3, L=21, I=18)
    strided = dict(tensors)
    xz_SBI = torch.cat((tensors["u"], tensors["z"]), dim=-1).transpose(0, 1).contiguous()
    strided["u"], strided["z"] = (half.transpose(0, 1) for half in xz_SBI.chunk(2, dim=-1))
    strided["delta"] = tensors["delta"].transpose(0, 1).contiguous().transpose(0, 1)
    expected = values_and_gradients(tensors, options, name)
    with implementation(name) as backend:
        leaves = {key: tensor.detach().requires_grad_() for key, tensor in strided.items()}
        y, state = call(leaves, options, backend)
        torch.autograd.backward((y, state), (torch.ones_like(y).transpose(0, 1).contiguous().transpose(0, 1),
                                             torch.zeros_like(state)))  # fmt: skip
        contiguous = {key: tensor.clone().requires_grad_() for key, tensor in tensors.items()}
        call(contiguous, options, backend)[0].sum().backward()
    torch.testing.assert_close(y.detach(), expected["y"])
    for key in leaves:
        torch.testing.assert_close(leaves[key].grad, contiguous[key].grad)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_final_state_alone_has_gradients(name):
    tensors, options = scan_inputs()
    leaves = {key: tensor.clone().requires_grad_() for key, tensor in tensors.items()}
    with implementation(name) as backend:
        call(leaves, options, backend)[1].sum().backward()
    assert leaves["u"].grad.any() and leaves["initial_state"].grad.any()
    for without_influence in ("z", "C", "D"):
        grad = leaves[without_influence].grad
        assert grad is None or not grad.any()


@pytest.mark.parametrize("name", CPP)
def test_any_number_of_threads_gives_the_same_bits(name):
    inputs = scan_inputs(B=2, L=50, I=300, reset="some")
    results = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(values_and_gradients(*inputs, name))
    finally:
        torch.set_num_threads(1)
    for result in results[1:]:
        assert all(torch.equal(result[key], results[0][key]) for key in result)


@pytest.mark.skipif(len(ISAS) < 2, reason="only one instruction set runs here")
def test_backward_uses_instruction_set_of_its_forward():
    tensors, options = scan_inputs(L=40)  # 19 channels: vectors of 4, 8 and 16 lay the stored states out differently
    expected = values_and_gradients(tensors, options, "float64")
    leaves = {key: tensor.clone().requires_grad_() for key, tensor in tensors.items()}
    with implementation("cpp-plain") as backend:
        y, state = call(leaves, options, backend)
    g = torch.Generator().manual_seed(1)
    torch.autograd.backward((y, state), (torch.randn(y.shape, generator=g), torch.randn(state.shape, generator=g)))
    actual = {f"gradient of {key}": leaf.grad for key, leaf in leaves.items()}
    assert_close(actual, {key: expected[key] for key in actual}, tolerance=1e-5)


@pytest.mark.parametrize("reset", [None, "some"])
def test_chunked_scan_keeps_float64(reset):
    tensors, options = scan_inputs(L=40, I=19, reset=reset)
    inputs = {key: tensor.double() for key, tensor in tensors.items()}, options
    actual = values_and_gradients(*inputs, "chunked", torch.float64)
    assert {value.dtype for value in actual.values()} == {torch.float64}
    assert_close(actual, values_and_gradients(*inputs, "float64", torch.float64), tolerance=1e-12)


def test_the_best_backend_that_can_is_chosen():
    tensors, options = scan_inputs(N=65, L=3)
    assert call(tensors, options, "auto")[0].shape == tensors["u"].shape  # too many states for C++
    with pytest.raises(ValueError, match=r"65 states, at most 64|not built"):
        call(tensors, options, "cpp")
    exact = {key: tensor.double() for key, tensor in tensors.items()}
    assert call(exact, options, "auto")[1].dtype == torch.float64
    assert set(available_backends()) == {"cuda", "mamba_ssm", "triton", "cpp", "chunked", "reference"}
    assert available_backends()["chunked"] is None and available_backends()["reference"] is None


def test_wrong_calls_are_refused_by_name():
    tensors, options = scan_inputs()
    with pytest.raises(ValueError, match=r"backend must be one of auto.*'fast'"):
        call(tensors, options, "fast")
    with pytest.raises(ValueError, match=r"B has shape \(2, 40, 8\), expected \(2, 40, 16\)"):
        call(tensors | {"B": tensors["B"][:, :, :8]}, options, "auto")
    with pytest.raises(ValueError, match="reset must be a bool tensor"):
        call(tensors, options | {"reset_BL": torch.zeros(2, 40)}, "auto")


@pytest.mark.parametrize("length", [40, 19])  # 19: as many tokens as channels, which only B and C tell apart
def test_channel_first_tensors_are_refused(length):
    tensors, _ = scan_inputs(L=length)
    for name in ("u", "delta", "B", "C"):
        tensors[name] = tensors[name].transpose(1, 2)
    with pytest.raises(ValueError, match=r"channel-first.*\.transpose\(1, 2\)"):
        selective_scan(*(tensors[name] for name in ("u", "delta", "A", "B", "C")))
