"""The benchmark of the experts measures bf16 only on processors that have instructions for it."""

from benchmarks import experts


def test_bf16_is_left_out_without_instructions(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert experts.dtypes("cpu") == ["float32"]
    assert experts.dtypes("cuda") == ["float32", "bfloat16"]
    monkeypatch.setattr(experts, "bf16_products", lambda: True)
    assert experts.dtypes("cpu") == ["float32", "bfloat16"]
