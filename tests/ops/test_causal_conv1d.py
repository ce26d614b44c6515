import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_blackmamba.ops.causal_conv1d import available_backends, causal_conv1d, causal_conv1d_step
from tests.ops.implementations import CPP, PROPERTY, assert_close, implementation
from tests.ops.test_selective_scan import resets

IMPLEMENTATIONS = ["reference", *CPP]


def conv_inputs(B=2, L=40, I=19, K=4, window=True, bias=True, reset=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = {"x": torch.randn(B, L, I, generator=g), "weight": torch.randn(I, K, generator=g)}
    if bias:
        tensors["bias"] = torch.randn(I, generator=g)
    if window:
        tensors["window"] = torch.randn(B, K - 1, I, generator=g)
    return tensors, {"reset_BL": resets(reset, B, L, g)}


def call(tensors, options, backend):
    return causal_conv1d(
        tensors["x"], tensors["weight"], tensors.get("bias"), initial_window=tensors.get("window"), **options,
        return_final_window=True, backend=backend,
    )  # fmt: skip


def values_and_gradients(tensors, options, name, dtype=torch.float32):
    exact = name == "float64"
    leaves = {}
    for key, tensor in tensors.items():
        if key in ("x", "window"):
            tensor = tensor.to(dtype)
        leaves[key] = (tensor.double() if exact else tensor).detach().clone().requires_grad_()
    with implementation("reference" if exact else name) as backend:
        y, final_window = call(leaves, options, backend)
        g = torch.Generator().manual_seed(1)
        weight_y = torch.randn(y.shape, generator=g).to(dtype).to(y.dtype)
        torch.autograd.backward((y, final_window), (weight_y, torch.ones_like(final_window)))
    gradients = {f"gradient of {key}": leaf.grad for key, leaf in leaves.items()}
    return {"y": y.detach(), "final window": final_window.detach(), **gradients}


def by_hand(x, weight, bias, window, reset):
    """One sum at a time, in Python."""
    (B, L, I), K = x.shape, weight.shape[1]
    y = torch.zeros(B, L, I, dtype=torch.float64)
    for b in range(B):
        for t in range(L):
            total = bias.double().clone()
            for back in range(K):
                source = x[b, t - back] if t >= back else window[b, K - 1 + t - back]
                total += weight[:, K - 1 - back].double() * source.double()
                if reset[b, max(t - back, 0)] and t >= back:
                    break
            y[b, t] = total
    return y


def test_the_reference_is_the_definition():
    tensors, options = conv_inputs(L=12, I=3, reset="some", seed=2)
    y, _ = call({key: t.double() for key, t in tensors.items()}, options | {"activation": None}, "reference")
    torch.testing.assert_close(y, by_hand(**tensors, reset=options["reset_BL"]))


@pytest.mark.parametrize("name", CPP)
@PROPERTY
@given(
    B=st.integers(1, 3),
    L=st.one_of(st.integers(1, 4), st.integers(1, 70)),
    I=st.one_of(st.integers(1, 40), st.sampled_from([128, 145])),
    K=st.integers(2, 4),
    window=st.booleans(),
    bias=st.booleans(),
    activation=st.sampled_from(["silu", None]),
    reset=st.sampled_from([None, "first", "last", "some", "all"]),
    seed=st.integers(0, 2**20),
)
def test_agrees_with_float64_in_values_and_all_gradients(name, B, L, I, K, window, bias, activation, reset, seed):
    tensors, options = conv_inputs(B, L, I, K, window, bias, reset, seed)
    options["activation"] = activation
    expected = values_and_gradients(tensors, options, "float64")
    assert_close(values_and_gradients(tensors, options, name), expected, tolerance=1e-5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("reset", [None, "some"])
def test_bf16_rounds_only_what_goes_in_and_out(name, reset):
    inputs = conv_inputs(L=100, I=35, reset=reset)
    expected = values_and_gradients(*inputs, "float64", torch.bfloat16)
    assert_close(values_and_gradients(*inputs, name, torch.bfloat16), expected, tolerance=4e-3)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("cut", [1, 2, 16, 39])
@pytest.mark.parametrize("reset", [None, "some", "all"])
def test_two_parts_through_the_window_are_one_sequence(name, cut, reset):
    tensors, options = conv_inputs(reset=reset, seed=4)
    reset_BL = options["reset_BL"]
    with implementation(name) as backend:
        y, final_window = call(tensors, options, backend)
        first, second = dict(tensors), dict(tensors)
        first["x"], second["x"] = tensors["x"][:, :cut], tensors["x"][:, cut:]
        part = lambda where: {"reset_BL": None if reset_BL is None else reset_BL[:, where]}
        y1, second["window"] = call(first, part(slice(cut)), backend)
        y2, final_window2 = call(second, part(slice(cut, None)), backend)
    torch.testing.assert_close(torch.cat((y1, y2), dim=1), y)
    torch.testing.assert_close(final_window2, final_window)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("activation", ["silu", None])
def test_steps_match_the_whole_convolution(name, activation):
    tensors, options = conv_inputs(L=9)
    with implementation(name) as backend:
        y, final_window = call(tensors, options | {"activation": activation}, backend)
    window = tensors["window"].clone()
    for t in range(9):
        y_t = causal_conv1d_step(window, tensors["x"][:, t], tensors["weight"], tensors["bias"], activation)
        torch.testing.assert_close(y_t, y[:, t])
    assert torch.equal(window, final_window)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_sequence_first_halves_of_projection_need_no_copy(name):
    tensors, options = conv_inputs(B=3, L=21, I=18)
    wide_SBI = torch.cat((tensors["x"], tensors["x"]), dim=-1).transpose(0, 1).contiguous()
    strided = tensors | {"x": wide_SBI.transpose(0, 1)[:, :, :18]}
    expected = values_and_gradients(tensors, options, name)
    with implementation(name) as backend:
        leaves = {key: tensor.detach().requires_grad_() for key, tensor in strided.items()}
        y, _ = call(leaves, options, backend)
        y.sum().backward()
        contiguous = {key: tensor.clone().requires_grad_() for key, tensor in tensors.items()}
        call(contiguous, options, backend)[0].sum().backward()
    torch.testing.assert_close(y.detach(), expected["y"])
    for key in leaves:
        torch.testing.assert_close(leaves[key].grad, contiguous[key].grad)


@pytest.mark.parametrize("name", CPP)
def test_any_number_of_threads_gives_the_same_bits(name):
    inputs = conv_inputs(B=2, L=50, I=300, reset="some")
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(values_and_gradients(*inputs, name))
    finally:
        torch.set_num_threads(1)
    for result in results[1:]:
        assert all(torch.equal(result[key], results[0][key]) for key in result)


def test_the_best_backend_that_can_is_chosen():
    tensors, options = conv_inputs(K=6)
    y, window = call(tensors, options, "auto")  # too many taps for C++
    assert y.shape == tensors["x"].shape and window.shape == (2, 5, 19)
    with pytest.raises(ValueError, match=r"6 taps: 2, 3 and 4|not built"):
        call(tensors, options, "cpp")
    assert set(available_backends()) == {"triton", "cpp", "reference"}


def test_wrong_calls_are_refused_by_name():
    tensors, options = conv_inputs()
    with pytest.raises(ValueError, match=r"activation must be .*'relu'"):
        call(tensors, options | {"activation": "relu"}, "auto")
    with pytest.raises(ValueError, match=r"initial_window has shape \(2, 2, 19\), expected \(2, 3, 19\)"):
        call(tensors | {"window": tensors["window"][:, 1:]}, options, "auto")


def test_channel_first_input_is_refused():
    with pytest.raises(ValueError, match=r"channel-first.*Pass \(batch, length, channels\): x\.transpose\(1, 2\)"):
        causal_conv1d(torch.zeros(2, 8, 40), torch.zeros(8, 4))
