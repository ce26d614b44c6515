import pytest

from megatron_blackmamba.config import load
from megatron_blackmamba.training.watch.speed import Utilisation, known_gpu, memory_bytes


@pytest.mark.parametrize(
    "driver_says, name",
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
    ],
)
def test_gpu_is_recognised_by_its_driver_name(driver_says, name):
    assert known_gpu(driver_says).name.startswith(name)


@pytest.mark.parametrize(
    "driver_says",
    [
        *("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
        *("NVIDIA GeForce RTX 4090", ""),
    ],
)
def test_a_gpu_of_unknown_peak_gets_no_utilisation(driver_says):
    assert Utilisation(load("tiny"), 8, driver_says).of(2048, 1.0) is None


def test_utilisation_is_model_flops_over_all_gpu_peaks():
    config = load("blackmamba_1.5b")
    # 2.07 GFLOP a token, 2,064,384 tokens a step, 56 GPUs of 989 TFLOP/s
    assert Utilisation(config, 56, "NVIDIA H100 80GB HBM3").of(2_064_384, 0.2) == pytest.approx(
        2.07e9 * 2_064_384 / 0.2 / (56 * 989e12), rel=0.01
    )


def test_memory_is_that_of_this_process():
    before = memory_bytes()
    block = bytearray(64 * 2**20)
    assert memory_bytes() >= before and memory_bytes() > len(block)
