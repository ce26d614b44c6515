"""The Triton kernels of a decoding step, interpreted, against the formulas in float64."""

import pytest
import torch

pytest.importorskip("triton")

from tests.ops import test_decoding as definition
from tests.ops.implementations import assert_close
from tests.ops.test_decoding import EPS, draw, experts_weights, mamba_weights

pytestmark = pytest.mark.xdist_group("triton")
EXACT, FLIPPED = 1e-6, 2e-3
"""Errors relative to the largest entry. In bf16, sums in another order round a few inputs of products the other way."""


def rounding(sequences, dtype):
    """Return how the kernels round inputs of products: one sequence is computed in fp32 whatever the weights are."""
    rounds = sequences > 1 and dtype == torch.bfloat16
    return (lambda x: x.to(dtype).double(), FLIPPED) if rounds else (lambda x: x, EXACT)


def small_tiles():
    """Make tiles so small that a test's shapes need several, the last of them not full."""
    from megatron_blackmamba.ops.decoding import triton as decoding

    decoding.ONE = {part: decoding.Tiling(4, 16, 1) for part in decoding.ONE}
    decoding.FEW = {part: decoding.Tiling(16, 16, 1) for part in decoding.FEW}
    decoding.PROGRAMS = 5
    decoding.MOST_ROWS = 20


def run_block(name, weights, moving, how, last_B=None):
    from megatron_blackmamba.ops import decoding

    small_tiles()
    step = getattr(decoding, name)(**weights, **how)
    assert type(step).__module__.endswith("decoding.triton")
    step(*moving.values(), last_B=last_B)
    return moving


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sequences", "I", "N"), [(1, 44, 16), (3, 44, 16), (23, 40, 5)])
def test_mamba_block_agrees_with_float64(interpreted, sequences, I, N, dtype):
    weights = mamba_weights(D=37, I=I, N=N, R=7, K=4, seed=0, dtype=dtype)
    moving = draw(1, residual=(sequences, 37), window=(sequences, 3, I), state=(sequences, I, N))
    rounded, tolerance = rounding(sequences, dtype)
    exact = definition.mamba_in_float64(weights, **moving, rounded=rounded)
    actual = interpreted(run_block, "mamba_step", weights, moving, {"eps": EPS})
    assert_close(actual, exact, tolerance)


@pytest.mark.parametrize("sequences", [1, 23])
def test_mamba_block_restarts_after_the_end(interpreted, sequences):
    weights = mamba_weights(D=37, I=44, N=16, R=7, K=4, seed=0)
    moving = draw(1, residual=(sequences, 37), window=(sequences, 3, 44), state=(sequences, 44, 16))
    last_B = torch.arange(sequences) % 3
    forgotten = {name: moving[name].clone() for name in moving}
    for name in ("window", "state"):
        forgotten[name][last_B == 0] = 0
    exact = definition.mamba_in_float64(weights, **forgotten)
    actual = interpreted(run_block, "mamba_step", weights, moving, {"eps": EPS, "eod": 0}, last_B)
    assert_close(actual, exact, EXACT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sequences", "bias", "activation"), [
    (1, "none", "silu"), (1, "on scores", "gelu"), (5, "none", "gelu"), (23, "on logits", "silu"),
    (23, "on scores", "silu"),
])  # fmt: skip
def test_experts_block_agrees_with_float64(interpreted, sequences, bias, activation, dtype):
    weights, on_scores = experts_weights(D=37, E=6, F=44, seed=0, dtype=dtype), bias == "on scores"
    if bias != "none":
        weights |= draw(2, choice_bias_E=(6,))
    moving = draw(1, residual=(sequences, 37))
    rounded, tolerance = rounding(sequences, dtype)
    exact = definition.experts_in_float64(
        weights, **moving, activation=activation, bias_on_scores=on_scores, rounded=rounded
    )
    how = {"activation": activation, "eps": EPS, "bias_on_scores": on_scores}
    actual = interpreted(run_block, "experts_step", weights, moving, how)
    assert_close(actual, exact, tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sequences", [1, 18])
def test_mlp_block_agrees_with_float64(interpreted, sequences, dtype):
    weights = experts_weights(D=37, E=1, F=44, seed=0, dtype=dtype)
    router = {"router_ED": torch.zeros(1, 37), "router_bias_E": torch.full((1,), 50.0)}  # whose sigmoid is 1
    moving = draw(1, residual=(sequences, 37))
    rounded, tolerance = rounding(sequences, dtype)
    exact = definition.experts_in_float64(
        weights | router, **moving, activation="silu", bias_on_scores=False, rounded=rounded
    )
    only = {"norm_D": weights["norm_D"], "fc1_GD": weights["fc1_EGD"][0], "fc2_DF": weights["fc2_EDF"][0]}
    actual = interpreted(run_block, "mlp_step", only, moving, {"activation": "silu", "eps": EPS})
    assert_close(actual, exact, tolerance)


def run_ends(tokens_B, embedding_VD, head_VD):
    from megatron_blackmamba.ops.decoding import triton as decoding

    small_tiles()
    decoding.MOST_ROWS = 256
    stream_BD = decoding.embedded(tokens_B, embedding_VD, 3.0)
    return {"stream": stream_BD, "logits": decoding.product(stream_BD, head_VD)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sequences", [1, 23])
def test_embedding_and_head_agree_with_float64(interpreted, sequences, dtype):
    weights = draw(0, embedding=(50, 37), head=(50, 37))
    embedding, head = weights["embedding"].to(dtype), weights["head"].to(dtype)
    tokens_B = torch.arange(sequences) * 7 % 50
    stream = embedding.double()[tokens_B] * 3
    rounded, tolerance = rounding(sequences, dtype)
    actual = interpreted(run_ends, tokens_B, embedding, head)
    assert_close(actual, {"stream": stream, "logits": rounded(stream) @ head.double().t()}, tolerance)


def run_likeliest(logits_BV):
    from megatron_blackmamba.ops.decoding import triton as decoding

    return decoding.likeliest(logits_BV)


def test_likeliest_is_the_first_largest_finite_logit(interpreted):
    logits_BV = draw(0, logits=(6, 5000))["logits"].clamp(max=2.0)
    logits_BV[2, [4001, 4999]] = 7.0
    logits_BV[3], logits_BV[4, 4500], logits_BV[5, 17] = -3.0, float("nan"), float("inf")
    expected = logits_BV.argmax(dim=-1)
    assert expected[2:4].tolist() == [4001, 0]
    expected[4:] = -1
    assert interpreted(run_likeliest, logits_BV).tolist() == expected.tolist()
