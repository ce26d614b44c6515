"""The band of a rehearsed MFU, from a step of four operations whose times are known."""

import pytest

from benchmarks.rehearsal import band
from benchmarks.rehearsal.record import Op, Place
from megatron_blackmamba.plan import gpus

GPU = gpus.KNOWN["h200"].model_copy(
    update={"bf16_tflops": 1000, "product_share": 0.8, "memory_gb_s": 1000, "nvlink_gb_s": 500}
)


def op(name, moved=0.0, flops=0.0, sent=0.0):
    return Op(name, Place("part"), "forward", moved, flops, 0.0, 0, "bfloat16", (), "here", sent)


OPS = [op("mm", flops=0.8e12), op("copy_", moved=1e9), op("c10d::alltoall_base_", sent=0.78e9), op("c10d::x", sent=9e9)]
STEP = band.Step(OPS, waits=10, ranks=2, useful=1e12)
"""1 ms of products, 1 ms of copies; 1 ms of exchange and 0.5 ms of waits, if these cost anything."""


def percents(rows, column):
    return [float(row[column].rstrip("%")) for row in rows]


def test_each_assumption_shows_what_it_is_worth():
    rows = band.band(STEP, GPU, "bf16")
    assert percents(rows, "MFU if lower") == pytest.approx([50.0, 44.8, 33.3, 40.0, 26.8], abs=0.05)


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_measured_share_replaces_both_ends(share):
    gpu = GPU.model_copy(update={"product_share": share})
    rows = band.band(STEP, gpu, "bf16", measured=True)
    assert rows[1]["upper end"].startswith(rows[1]["lower end"])
    (left,) = band.if_measured(STEP, GPU, "bf16", [share])
    assert (rows[-1]["MFU if lower"], rows[0]["MFU if lower"]) == (left["MFU from"], left["to"])
