import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megatron_blackmamba.ops.matvec import FEW, MAX_VECTORS, SEVERAL, bf16_products, matvec, product, why_not_cpp
from tests.ops.implementations import CPP, PROPERTY, implementation


@pytest.mark.parametrize("name", CPP)
@PROPERTY
@given(
    vectors=st.integers(1, 9) | st.sampled_from([MAX_VECTORS, MAX_VECTORS + 1, 3 * MAX_VECTORS]),
    rows=st.integers(1, 150),
    columns=st.integers(1, 150),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**20),
)
def test_agrees_with_float64(name, vectors, rows, columns, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=g).to(dtype)
    x = torch.randn(vectors, columns, generator=g).to(dtype)
    with implementation(name):
        y = matvec(weight, x)
    exact = F.linear(x.double(), weight.double())
    assert y.dtype == dtype and y.shape == exact.shape
    scale = F.linear(x.double().abs(), weight.double().abs()).max()
    assert (y.double() - exact).abs().max() <= scale * (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("name", CPP)
def test_part_of_a_matrix_needs_no_copy(name):
    weight, x = torch.randn(64, 100), torch.randn(2, 48)
    with implementation(name):
        assert why_not_cpp(weight[::2, 10:58], x) is None
        torch.testing.assert_close(matvec(weight[::2, 10:58], x), F.linear(x, weight[::2, 10:58]))


@pytest.mark.parametrize("name", CPP)
def test_threads_share_a_large_matrix(name):
    weight, x = torch.randn(1000, 2100), torch.randn(1, 2100)
    try:
        torch.set_num_threads(4)
        with implementation(name):
            y = matvec(weight, x)
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(y, F.linear(x, weight), rtol=1e-4, atol=1e-3)


def test_what_cpp_cannot_do_goes_to_pytorch():
    weight = torch.randn(20, 30)
    transposed = torch.randn(30, 20).t()
    others = [(weight.double(), torch.randn(1, 30).double()), (transposed, torch.randn(1, 30))]
    for w, x in [*others, (weight, torch.randn(2, 3, 30))]:
        assert why_not_cpp(w, x)
        assert torch.equal(matvec(w, x), F.linear(x, w))


def test_fp32_vectors_meet_bf16_weights_in_any_number():
    weight = torch.randn(20, 30).bfloat16()
    for vectors in (1, 9):
        x = torch.randn(vectors, 30)
        torch.testing.assert_close(matvec(weight, x), F.linear(x, weight.float()), rtol=2e-2, atol=1e-1)


def test_nothing_needs_a_gradient():
    assert not matvec(torch.randn(4, 4, requires_grad=True), torch.randn(1, 4)).requires_grad


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vectors", [1, FEW + 1, SEVERAL + 1])
def test_products_agree_whichever_way_they_go(native, dtype, vectors, monkeypatch):
    monkeypatch.setattr("megatron_blackmamba.ops.matvec.bf16_products", lambda: native)
    weight, x = torch.randn(40, 96).to(dtype), torch.randn(2, vectors, 96).to(dtype)
    y, exact = product(x, weight), F.linear(x.double(), weight.double())
    assert y.dtype == dtype and y.shape == exact.shape
    assert (y.double() - exact).abs().max() <= exact.abs().max() * (1e-6 if dtype == torch.float32 else 4e-3)
    assert product(x[:, :0], weight).shape == (2, 0, 40)


@pytest.mark.parametrize(("allowed", "native"), [("AVX2", False), ("SSE41", False), ("AVX512_CORE", False)])
def test_a_limit_of_instructions_is_obeyed(allowed, native, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", allowed)
    bf16_products.cache_clear()
    try:
        assert bf16_products() is native
    finally:
        bf16_products.cache_clear()
