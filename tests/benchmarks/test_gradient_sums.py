"""The benchmark of gradients added up in bf16 measures errors that are known."""

import pytest
import torch

from benchmarks import gradient_sums

COLUMNS = ("fp32", "bf16", "bf16, worst weight", "bf16, lost")


def test_small_gradients_are_lost_in_bf16():
    """1 + 255 times 2^-9, half of what bf16 can add to 1: the sum in bf16 stays 1, and all but 1 is lost."""
    gradients = iter([[torch.ones(4, dtype=torch.bfloat16)]] + [[torch.full((4,), 2.0**-9).bfloat16()]] * 255)
    first, last = gradient_sums.measure(gradients, [1, 256])
    assert [float(first[column]) for column in COLUMNS] == [0, 0, 0, 0]
    assert first["of the batch"] == ""
    lost = 255 / 512 / (1 + 255 / 512)
    for column in COLUMNS[1:]:
        assert float(last[column]) == pytest.approx(lost, rel=0.02)
    assert float(last["fp32"]) == 0


def test_halves_that_differ_estimate_the_noise():
    """The halves of two micro-batches are 1 and 3: half their difference is 1/2 of their mean."""
    gradients = iter([[torch.full((4,), value).bfloat16()] for value in (1.0, 3.0)])
    (row,) = gradient_sums.measure(gradients, [2])
    assert row["of the batch"] == "0.5"
    assert float(row["bf16"]) == 0
