"""The calls that the Triton backends refuse, so that another backend runs them."""

import pytest
import torch

pytest.importorskip("triton")

from megatron_blackmamba.ops.selective_scan import Inputs
from megatron_blackmamba.ops.selective_scan import triton as scan


@pytest.fixture(autouse=True)
def pretend_interpreted(monkeypatch):
    monkeypatch.setattr(scan, "interpreted", lambda: True)


@pytest.mark.parametrize(
    ("shape", "state", "dtype", "reason"),
    [
        ((1, 8, 4), 16, torch.bfloat16, None),
        ((8, 2048, 2304), 16, torch.bfloat16, None),
        ((1, 8, 4), 16, torch.float64, "float64"),
        ((1, 8, 4), 10, torch.float32, "not 10"),
        ((1, 0, 4), 16, torch.float32, "empty"),
        ((1, 1_000_000, 2304), 16, torch.bfloat16, None),
        ((1, 3_000_000, 4), 16, torch.bfloat16, "at most 2,097,120 tokens"),  # more chunks do not fit into one launch
        ((70_000, 1, 4), 16, torch.bfloat16, "at most 65,535 sequences"),
    ],
)
def test_the_scan_names_what_is_not_for_it(shape, state, dtype, reason):
    u, A = torch.empty(shape, dtype=dtype, device="meta"), torch.empty(shape[-1], state, device="meta")
    B = torch.empty(*shape[:2], state, dtype=dtype, device="meta")
    answer = scan.unsupported(Inputs(u, u, A, B, B))
    assert answer is None if reason is None else reason in answer
