import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_blackmamba.ops.delta import available_backends, chunked, delta, delta_step
from tests.ops.implementations import PROPERTY, assert_close
from tests.ops.test_selective_scan import resets

TOKENS = ("q", "k", "erase", "written", "log_decay")


def problem(B=2, L=150, H=3, K=8, V=5, by_channel=True, state=True, reset=None, seed=0):
    """Return random keys of length 1 with gates from 0 to 2."""
    g = torch.Generator().manual_seed(seed)
    normal = torch.nn.functional.normalize
    q, k = (normal(torch.randn(B, L, H, K, generator=g), dim=-1) for _ in range(2))
    gate = 2 * torch.rand(B, L, H, K if by_channel else 1, generator=g)
    tensors = {"q": q, "k": k, "erase": gate * k, "written": torch.randn(B, L, H, V, generator=g)}
    tensors["log_decay"] = -torch.rand(B, L, H, K if by_channel else 1, generator=g) / 2
    if state:
        tensors["initial_state"] = torch.randn(B, H, K, V, generator=g)
    return tensors, resets(reset, B, L, g)


def values_and_gradients(tensors, reset, backend, dtype=torch.float32):
    """Tokens in `dtype` and the state in fp32; or all in float64 by the reference, from the same rounded numbers."""
    exact, leaves = backend == "float64", {}
    for name, tensor in tensors.items():
        tensor = tensor.to(dtype) if name in TOKENS else tensor
        leaves[name] = (tensor.double() if exact else tensor).detach().clone().requires_grad_()
    y, state = delta(
        *(leaves[name] for name in TOKENS),
        initial_state_BHKV=leaves.get("initial_state"),
        reset_BL=reset,
        backend="reference" if exact else backend,
    )
    g = torch.Generator().manual_seed(1)
    weight_y = torch.randn(y.shape, generator=g).to(dtype).to(y.dtype)
    torch.autograd.backward((y, state), (weight_y, torch.randn(state.shape, generator=g).to(state.dtype)))
    return {"y": y.detach(), "state": state.detach()} | {f"gradient of {name}": x.grad for name, x in leaves.items()}


def test_one_token_erases_writes_and_is_read():
    """By hand: half of the 3 under the key decays, a quarter of the rest is erased, 2 is written, then read once."""
    key, half = torch.tensor([[[[1.0, 0.0]]]]), torch.full((1, 1, 1, 1), 0.5).log()
    state = torch.tensor([[[[3.0], [7.0]]]])
    y, end = delta(key, key, key / 4, torch.tensor([[[[2.0]]]]), half, initial_state_BHKV=state)
    assert y.item() == pytest.approx(1.5 * 3 / 4 + 2) and end.flatten().tolist() == pytest.approx([y.item(), 3.5])


@PROPERTY
@given(
    B=st.integers(1, 3),
    L=st.one_of(st.sampled_from([1, 63, 64, 65]), st.integers(1, 200)),
    H=st.integers(1, 3),
    K=st.integers(1, 17),
    V=st.integers(1, 9),
    by_channel=st.booleans(),
    state=st.booleans(),
    reset=st.sampled_from([None, "first", "last", "some", "all"]),
    seed=st.integers(0, 2**20),
)
def test_agrees_with_float64_in_values_and_gradients(B, L, H, K, V, by_channel, state, reset, seed):
    tensors, reset = problem(B, L, H, K, V, by_channel, state, reset, seed)
    expected = values_and_gradients(tensors, reset, "float64")
    assert_close(values_and_gradients(tensors, reset, "chunked"), expected, tolerance=1e-5)
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    assert_close(values_and_gradients(exact, reset, "chunked", torch.float64), expected, tolerance=1e-12)


@pytest.mark.parametrize("by_channel", [False, True])
def test_segments_of_several_chunks_agree_with_float64(by_channel, monkeypatch):
    tensors, reset = problem(L=9 * chunked.CHUNK + 5, by_channel=by_channel, reset="some")
    monkeypatch.setitem(chunked.NUMBERS, "cpu", 3 * chunked.CHUNK * tensors["k"][:, 0].numel())
    assert len(chunked.segments(chunked.Inputs(*(tensors[name] for name in TOKENS)))) == 4
    expected = values_and_gradients(tensors, reset, "float64")
    assert_close(values_and_gradients(tensors, reset, "chunked"), expected, tolerance=1e-5)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_decays_of_any_size_are_finite_and_right(dtype, tolerance, by_channel):
    """Tokens that forget everything, in one channel or all, beside tokens that forget next to nothing."""
    tensors, _ = problem(L=128, by_channel=by_channel)
    g = torch.Generator().manual_seed(2)
    decay = tensors["log_decay"]
    decay *= 10.0 ** torch.randint(-5, 6, decay.shape, generator=g)
    decay[:, 40, 0] = decay[:, 41] = -torch.inf
    if dtype == torch.float64:
        tensors = {name: tensor.double() for name, tensor in tensors.items()}
    expected, actual = (values_and_gradients(tensors, None, backend, dtype) for backend in ("float64", "chunked"))
    assert all(tensor.isfinite().all() for tensor in actual.values())
    assert_close(actual, expected, tolerance)


@pytest.mark.parametrize("by_channel", [False, True])
def test_small_decays_survive_behind_a_huge_one(by_channel):
    """Differences of fp32 running sums would be off by the rounding of the huge sum."""
    tensors, _ = problem(L=64, by_channel=by_channel, state=False)
    tensors["log_decay"] = torch.full_like(tensors["log_decay"], -1e-3)
    tensors["log_decay"][:, 8] = -900.0
    y = delta(*(tensors[name] for name in TOKENS))[0]
    exact = delta(*(tensors[name].double() for name in TOKENS), backend="reference")[0]
    assert_close({"y": y}, {"y": exact}, tolerance=2e-6)  # 7e-7 was seen, and 3e-5 with the mistake


@pytest.mark.parametrize("by_channel", [False, True])
def test_documents_do_not_see_each_other(by_channel):
    tensors, _ = problem(L=100, by_channel=by_channel, state=False)
    reset = torch.zeros(2, 100, dtype=torch.bool)
    reset[:, 37] = True
    y, state = delta(*(tensors[name] for name in TOKENS), reset_BL=reset)
    others, _ = problem(L=100, by_channel=by_channel, seed=1)
    for name in TOKENS:
        tensors[name][:, :37] = others[name][:, :37]
    other_y, other_state = delta(*(tensors[name] for name in TOKENS), reset_BL=reset)
    assert torch.equal(y[:, 37:], other_y[:, 37:]) and torch.equal(state, other_state)


def test_one_gate_a_head_never_makes_states_grow():
    """A reflection has an eigenvalue of -1; nothing is written, so no state may become longer."""
    tensors, _ = problem(L=500)
    tensors["erase"], tensors["log_decay"] = 2 * tensors["k"], torch.zeros_like(tensors["log_decay"])
    tensors["written"] = torch.zeros_like(tensors["written"])
    start = tensors["initial_state"]
    end = delta(*(tensors[name] for name in TOKENS), initial_state_BHKV=start)[1]
    assert end.norm(dim=2) == pytest.approx(start.norm(dim=2), rel=1e-4)


def test_steps_give_what_a_whole_sequence_gives():
    tensors, _ = problem(L=20)
    tokens = [tensors[name] for name in TOKENS]
    y, end = delta(*tokens, initial_state_BHKV=tensors["initial_state"])
    state = tensors["initial_state"].clone()
    steps = [delta_step(state, *(x[:, t] for x in tokens)) for t in range(20)]
    assert_close({"y": torch.stack(steps, 1), "state": state}, {"y": y, "state": end}, tolerance=1e-6)


def test_types_of_results_follow_the_queries():
    tensors, _ = problem(state=False)
    y, state = delta(*(tensors[name].bfloat16() for name in TOKENS))
    assert y.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert set(available_backends()) == {"chunked", "triton", "reference"}


@pytest.mark.parametrize("name, shape", [("log_decay", (2, 150, 3, 2)), ("erase", (2, 150, 3, 7)), ("k", (2, 9, 3, 8))])
def test_other_shapes_are_refused_by_name(name, shape):
    tensors, _ = problem(state=False)
    tensors[name] = torch.zeros(shape)
    with pytest.raises(ValueError, match=f"delta: {name} has"):
        delta(*(tensors[each] for each in TOKENS))
