import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops import experts as experts_module
from megatron_blackmamba.ops import gated as gated_module
from megatron_blackmamba.ops.experts import available_backends, grouped_experts, grouped_linear
from tests.ops.implementations import PROPERTY, assert_close

BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(bool(reason), reason=str(reason)))
    for name, reason in available_backends().items()
    if name != "fp8"  # test_fp8.py
]


def expert_inputs(tokens_per_expert, D=16, hidden=24, seed=0):
    g = torch.Generator().manual_seed(seed)
    E, T = len(tokens_per_expert), sum(tokens_per_expert)
    shapes = {"x": (T, D), "fc1": (E, 2 * hidden, D), "fc2": (E, D, hidden)}
    tensors = {name: torch.randn(shape, generator=g) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    return tensors, torch.tensor(tokens_per_expert)


def by_hand(x, fc1, fc2, tokens_per_expert, activation):
    """One token at a time, with the definition spelt out."""
    owner = [e for e, count in enumerate(tokens_per_expert.tolist()) for _ in range(count)]
    hidden, outputs = fc2.shape[2], [x[:0]]
    for token, e in zip(x, owner, strict=True):
        gate, up = fc1[e, :hidden] @ token, fc1[e, hidden:] @ token
        act = gate * torch.sigmoid(gate) if activation == "silu" else gate * 0.5 * (1 + torch.erf(gate / 2**0.5))
        outputs.append((fc2[e] @ (act * up))[None])
    return torch.cat(outputs)


def values_and_gradients(tensors, counts, function, dtype):
    leaves = {name: tensor.to(dtype).detach().clone().requires_grad_() for name, tensor in tensors.items()}
    y = function(leaves, counts)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    y.backward(weight)
    zero = lambda leaf: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return {"y": y.detach()} | {f"gradient of {name}": zero(leaf) for name, leaf in leaves.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@PROPERTY
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.sampled_from([8, 16, 40]), st.integers(0, 2**20))
def test_agrees_with_float64_in_values_and_all_gradients(backend, activation, counts, hidden, seed):
    tensors, tokens_per_expert = expert_inputs(counts, hidden=hidden, seed=seed)
    run = lambda t, n: grouped_experts(t["x"], n, t["fc1"], t["fc2"], activation=activation, backend=backend)
    exact = lambda t, n: by_hand(t["x"], t["fc1"], t["fc2"], n, activation)
    expected = values_and_gradients(tensors, tokens_per_expert, exact, torch.float64)
    if sum(counts):
        assert_close(values_and_gradients(tensors, tokens_per_expert, run, torch.float32), expected, tolerance=1e-5)
        rounded = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
        expected = values_and_gradients(rounded, tokens_per_expert, exact, torch.float64)
        assert_close(values_and_gradients(rounded, tokens_per_expert, run, torch.bfloat16), expected, tolerance=3e-2)
    else:
        assert values_and_gradients(tensors, tokens_per_expert, run, torch.float32)["y"].shape == (0, 16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_cpp", [False, True])
def test_token_weights_scale_the_output_once(backend, dtype, in_cpp, monkeypatch):
    if not in_cpp:  # without a kernel the weights meet the output, not the activation
        monkeypatch.setattr(experts_module, "is_fused", lambda *_: False)
        monkeypatch.setattr(gated_module, "BACKENDS", ("reference",))
    tensors, counts = expert_inputs([4, 0, 7])
    tensors = {name: tensor.to(dtype).float() for name, tensor in tensors.items()}
    tensors["weights"] = torch.rand(11, generator=torch.Generator().manual_seed(2)).to(dtype).float()
    run = lambda t, n: grouped_experts(t["x"], n, t["fc1"], t["fc2"], t["weights"], backend=backend)
    exact = lambda t, n: by_hand(t["x"], t["fc1"], t["fc2"], n, "silu") * t["weights"][:, None]
    actual = values_and_gradients(tensors, counts, run, dtype)
    assert actual["y"].dtype == dtype
    expected = values_and_gradients(tensors, counts, exact, torch.float64)
    assert_close(actual, expected, tolerance=1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_batch_gives_zero_weight_gradients(backend):
    """A rank may get none: its optimizer and its all-reduce want a gradient all the same."""
    tensors, counts = expert_inputs([0, 0])
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    y = grouped_experts(leaves["x"], counts, leaves["fc1"], leaves["fc2"], backend=backend)
    y.sum().backward()
    assert y.shape == (0, 16)
    for name in ("fc1", "fc2"):
        assert leaves[name].grad is not None and not leaves[name].grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expanded_gradient_is_taken(backend):
    tensors, counts = expert_inputs([2, 3])
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    grouped_experts(leaves["x"], counts, leaves["fc1"], leaves["fc2"], backend=backend).sum().backward()
    assert leaves["x"].grad.any()


@pytest.fixture
def asked_anew():
    """Ask again what this machine can use, and once more after the test."""
    for answers in (backends.why_not, backends._tried):
        answers.cache_clear()
    yield
    for answers in (backends.why_not, backends._tried):
        answers.cache_clear()


def test_private_grouped_mm_of_torch_is_not_used(monkeypatch, asked_anew):
    """On a GPU, that of torch 2.8 fails for an expert without tokens."""

    def fail(*_, **__):
        raise RuntimeError("expected gemm dimensions to be greater 0")

    monkeypatch.delattr(F, "grouped_mm", raising=False)
    monkeypatch.setattr(torch, "_grouped_mm", fail, raising=False)
    assert "lacks grouped_mm" in available_backends()["grouped_mm"]
    tensors, counts = expert_inputs([2, 0, 3])
    y = grouped_experts(tensors["x"], counts, tensors["fc1"], tensors["fc2"])
    torch.testing.assert_close(y, by_hand(**tensors, tokens_per_expert=counts, activation="silu"))


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason=f"torch {torch.__version__} lacks grouped_mm")
@pytest.mark.parametrize("right", [True, False])
def test_grouped_mm_is_tried_with_an_empty_expert(monkeypatch, asked_anew, right):
    """A B200's (PyTorch issue 172439) leaves what was in memory as the gradient of an expert without tokens."""
    multiply = F.grouped_mm

    def leave_garbage(x, weight, offs):
        weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor(1), 3.0))
        return multiply(x, weight, offs=offs)

    monkeypatch.setattr(backends, "has_gpu", lambda: True)
    monkeypatch.setattr(backends, "TRIAL_DEVICE", "cpu")
    if not right:
        monkeypatch.setattr(F, "grouped_mm", leave_garbage)
    with torch.inference_mode():
        reason = available_backends()["grouped_mm"]
    assert (reason is None) if right else ("expert without tokens" in reason)


def test_rows_unfit_for_grouped_mm_use_the_loop():
    tensors, counts = expert_inputs([4, 1], D=15, hidden=9)
    y = grouped_experts(tensors["x"], counts, tensors["fc1"], tensors["fc2"])
    torch.testing.assert_close(y, by_hand(**tensors, tokens_per_expert=counts, activation="silu"))
    with pytest.raises(ValueError, match=r"rows of|lacks grouped_mm"):
        grouped_linear(tensors["x"], counts, tensors["fc1"], backend="grouped_mm")


def test_wrong_calls_are_refused_by_name():
    tensors, counts = expert_inputs([4, 4])
    with pytest.raises(ValueError, match="activation must be one of silu, gelu, relu2, not 'relu'"):
        grouped_experts(tensors["x"], counts, tensors["fc1"], tensors["fc2"], activation="relu")
    for wrong in ([4, 5], [-1, 9]):
        with pytest.raises(ValueError, match=r"\[-?\d, \d\] are not counts that add up to 8"):
            grouped_experts(tensors["x"], torch.tensor(wrong), tensors["fc1"], tensors["fc2"])
    for wrong in (torch.tensor([2.5, 5.5]), [4, 4]):
        with pytest.raises(ValueError, match="tokens_per_expert must be a tensor of integers"):
            grouped_experts(tensors["x"], wrong, tensors["fc1"], tensors["fc2"])
    with pytest.raises(ValueError, match="2 weights, tokens_per_expert of shape"):
        grouped_experts(tensors["x"], torch.tensor([4, 4, 0]), tensors["fc1"], tensors["fc2"])
    with pytest.raises(ValueError, match=r"x has shape \(1, 8, \d+\)\. Pass 2 dimensions"):
        grouped_experts(tensors["x"][None], counts, tensors["fc1"], tensors["fc2"])
    with pytest.raises(ValueError, match="backend must be one of auto"):
        grouped_experts(tensors["x"], counts, tensors["fc1"], tensors["fc2"], backend="fast")
