"""A block's step in C++ against the formulas in float64, for every instruction set and shapes that fill no vector."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megatron_blackmamba.ops.decoding import experts_step, mamba2_step, mamba_step, why_not
from megatron_blackmamba.ops.matvec import MAX_VECTORS
from tests.ops.implementations import CPP, PROPERTY, assert_close, implementation

EPS = 1e-2  # large enough to be missed
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def norm(x, weight):
    return x * weight / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt()


def mamba_in_float64(w, residual, window, state, rounded=lambda x: x):
    """rounded: what is done to the inputs of products, for kernels that round them."""
    w = {name: tensor.double() for name, tensor in w.items()}
    residual, window, state = residual.double(), window.double(), state.double()
    I, R, N = w["D_I"].shape[0], w["dt_proj_IR"].shape[1], w["A_IN"].shape[1]
    x, z = (rounded(norm(residual, w["norm_D"])) @ w["in_proj"].t()).split(I, dim=-1)
    inputs = torch.cat((window, x[:, None]), dim=1)
    x = F.silu((inputs * w["conv_weight_IK"].t()).sum(dim=1) + w["conv_bias_I"])
    dt, B, C = (rounded(x) @ w["x_proj"].t()).split([R, N, N], dim=-1)
    delta = F.softplus(rounded(dt) @ w["dt_proj_IR"].t() + w["dt_bias_I"])
    state = state * (delta[:, :, None] * w["A_IN"]).exp() + (delta * x)[:, :, None] * B[:, None]
    y = ((state * C[:, None]).sum(dim=-1) + w["D_I"] * x) * F.silu(z)
    return {"residual": residual + rounded(y) @ w["out_proj"].t(), "window": inputs[:, 1:], "state": state}


def mamba2_in_float64(w, residual, window, state):
    w = {name: tensor.double() for name, tensor in w.items()}
    residual, window, state = residual.double(), window.double(), state.double()
    (H, P, N), I = state.shape[1:], w["norm_I"].shape[0]
    groups = (w["conv_bias_Q"].shape[0] - I) // (2 * N)
    z, x, dt = (norm(residual, w["norm_D"]) @ w["in_proj"].t()).split([I, w["conv_bias_Q"].shape[0], H], dim=-1)
    inputs = torch.cat((window, x[:, None]), dim=1)
    x = F.silu((inputs * w["conv_weight_QK"].t()).sum(dim=1) + w["conv_bias_Q"])
    x, B, C = x.split([I, groups * N, groups * N], dim=-1)
    x = x.unflatten(-1, (H, P))
    B, C = (part.unflatten(-1, (groups, N)).repeat_interleave(H // groups, dim=1) for part in (B, C))
    dt = F.softplus(dt + w["dt_bias_H"])[:, :, None, None]
    state = state * (dt * w["A_H"][:, None, None]).exp() + dt * x[..., None] * B[:, :, None]
    y = ((state * C[:, :, None]).sum(dim=-1) + w["D_H"][:, None] * x).flatten(1) * F.silu(z)
    y = norm(y.unflatten(-1, (groups, -1)), w["norm_I"].unflatten(-1, (groups, -1))).flatten(1)
    return {"residual": residual + y @ w["out_proj"].t(), "window": inputs[:, 1:], "state": state}


def experts_in_float64(w, residual, activation, bias_on_scores, rounded=lambda x: x):
    w = {name: tensor.double() for name, tensor in w.items()}
    x = norm(residual.double(), w["norm_D"])
    logits = x @ w["router_ED"].t() + w["router_bias_E"]
    ranks = logits.sigmoid() if bias_on_scores else logits
    choice = (ranks + w.get("choice_bias_E", 0)).argmax(dim=-1)
    best = logits.gather(-1, choice[:, None])[:, 0]
    y = torch.empty_like(x)
    for expert in choice.unique().tolist():
        mine = choice == expert
        gate, up = (rounded(x[mine]) @ w["fc1_EGD"][expert].t()).chunk(2, dim=-1)
        hidden = {"silu": F.silu, "gelu": F.gelu}[activation](gate) * up
        y[mine] = rounded(hidden) @ w["fc2_EDF"][expert].t()
    return {"residual": residual.double() + y * best.sigmoid()[:, None]}


def draw(seed, **shapes):
    """Standard normal, the matrices such that what comes out is again of the order of 1."""
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) / (shape[-1] if len(shape) > 1 else 1) ** 0.5
            for name, shape in shapes.items()}  # fmt: skip


def mamba_weights(D, I, N, R, K, seed, dtype=torch.float32):
    w = draw(seed, norm_D=(D,), in_proj=(2 * I, D), conv_weight_IK=(I, K), conv_bias_I=(I,), x_proj=(R + 2 * N, I),
             dt_proj_IR=(I, R), dt_bias_I=(I,), A_IN=(I, N), D_I=(I,), out_proj=(D, I))  # fmt: skip
    w["A_IN"] = -w["A_IN"].exp()
    return w | {name: w[name].to(dtype) for name in ("in_proj", "x_proj", "dt_proj_IR", "out_proj")}


def mamba2_weights(D, H, P, G, N, K, seed, dtype=torch.float32):
    I, Q = H * P, H * P + 2 * G * N
    w = draw(seed, norm_D=(D,), in_proj=(I + Q + H, D), conv_weight_QK=(Q, K), conv_bias_Q=(Q,), dt_bias_H=(H,),
             A_H=(H,), D_H=(H,), norm_I=(I,), out_proj=(D, I))  # fmt: skip
    w["A_H"] = -w["A_H"].exp()
    return w | {name: w[name].to(dtype) for name in ("in_proj", "out_proj")}


def experts_weights(D, E, F, seed, dtype=torch.float32):
    w = draw(seed, norm_D=(D,), router_ED=(E, D), router_bias_E=(E,), fc1_EGD=(E, 2 * F, D), fc2_EDF=(E, D, F))
    return w | {name: w[name].to(dtype) for name in ("fc1_EGD", "fc2_EDF")}


SEQUENCES = st.integers(1, 9) | st.sampled_from([MAX_VECTORS, MAX_VECTORS + 1, 2 * MAX_VECTORS + 3])


@pytest.mark.parametrize("name", CPP)
@PROPERTY
@given(
    sequences=SEQUENCES, D=st.integers(1, 150), I=st.integers(1, 150), N=st.integers(1, 40),
    R=st.integers(1, 20), K=st.integers(2, 5), threads=st.integers(1, 3), dtype=DTYPES, seed=st.integers(0, 2**20),
)  # fmt: skip
def test_a_mamba_block_agrees_with_float64(name, sequences, D, I, N, R, K, threads, dtype, seed):
    weights = mamba_weights(D, I, N, R, K, seed, dtype)
    moving = draw(seed + 1, residual=(sequences, D), window=(sequences, K - 1, I), state=(sequences, I, N))
    with implementation(name):
        step = mamba_step(**weights, eps=EPS)
        for _ in range(2):
            exact = mamba_in_float64(weights, **moving)
            step(*moving.values(), threads=threads)
            assert_close(moving, exact, tolerance=3e-6)


@pytest.mark.parametrize("name", CPP)
@PROPERTY
@given(
    sequences=SEQUENCES, D=st.integers(1, 150), heads=st.integers(1, 4), P=st.integers(1, 40), G=st.integers(1, 3),
    N=st.integers(1, 40), K=st.integers(2, 5), threads=st.integers(1, 3), dtype=DTYPES, seed=st.integers(0, 2**20),
)  # fmt: skip
def test_a_mamba2_block_agrees_with_float64(name, sequences, D, heads, P, G, N, K, threads, dtype, seed):
    weights, H = mamba2_weights(D, heads * G, P, G, N, K, seed, dtype), heads * G
    Q = H * P + 2 * G * N
    moving = draw(seed + 1, residual=(sequences, D), window=(sequences, K - 1, Q), state=(sequences, H, P, N))
    with implementation(name):
        step = mamba2_step(**weights, groups=G, eps=EPS)
        for _ in range(2):
            exact = mamba2_in_float64(weights, **moving)
            step(*moving.values(), threads=threads)
            assert_close(moving, exact, tolerance=3e-6)


@pytest.mark.parametrize("name", CPP)
@PROPERTY
@given(
    sequences=SEQUENCES, D=st.integers(1, 150), E=st.integers(1, 9), F=st.integers(1, 150),
    threads=st.integers(1, 3), activation=st.sampled_from(["silu", "gelu"]), dtype=DTYPES, seed=st.integers(0, 2**20),
    bias=st.sampled_from(["none", "on logits", "on scores"]),
)  # fmt: skip
def test_an_experts_block_agrees_with_float64(name, sequences, D, E, F, threads, activation, dtype, seed, bias):
    weights, how = experts_weights(D, E, F, seed, dtype), {"bias_on_scores": bias == "on scores"}
    if bias != "none":
        weights |= draw(seed + 2, choice_bias_E=(E,))
    moving = draw(seed + 1, residual=(sequences, D))
    exact = experts_in_float64(weights, **moving, activation=activation, **how)
    with implementation(name):
        experts_step(**weights, activation=activation, eps=EPS, **how)(moving["residual"], threads=threads)
    assert_close(moving, exact, tolerance=3e-6)


@pytest.mark.parametrize("name", CPP)
@pytest.mark.parametrize("gate", [-12.0, -5.0, -1.8, -0.1, 0.1, 1.8, 12.0])
def test_gelu_is_the_exact_one_at_every_size(name, gate):
    weights = {"norm_D": torch.ones(1), "router_ED": torch.zeros(1, 1), "router_bias_E": torch.full((1,), 40.0),
               "fc1_EGD": torch.tensor([[[gate], [1.0]]]), "fc2_EDF": torch.ones(1, 1, 1)}  # fmt: skip
    residual = torch.tensor([[1.0]])
    with implementation(name):
        experts_step(**weights, activation="gelu", eps=0.0)(residual)
    exact = F.gelu(torch.tensor(gate).double())
    assert (residual[0, 0].double() - 1 - exact).abs() < 2e-7 * (1 + abs(gate))


def test_what_does_not_fit_is_refused_by_name():
    weights = mamba_weights(4, 6, 3, 2, 4, seed=0)
    with pytest.raises(ValueError, match=r"x_proj: .*\(8, 6\).*where .* \(9, 6\)"):
        mamba_step(**weights | {"x_proj": torch.zeros(8, 6), "dt_proj_IR": torch.zeros(6, 3)}, eps=EPS)
    with pytest.raises(ValueError, match=r"norm: .*bfloat16"):
        mamba_step(**weights | {"norm_D": torch.ones(4).bfloat16()}, eps=EPS)
    step = mamba_step(**weights, eps=EPS)
    with pytest.raises(ValueError, match=r"state: .*float32"):
        step(torch.zeros(1, 4), torch.zeros(1, 3, 6), torch.zeros(2, 6, 3))
    assert "float64" in why_not(torch.zeros(1).double())
