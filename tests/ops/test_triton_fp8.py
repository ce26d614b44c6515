"""Rounding to FP8 by rows in Triton, interpreted.

The interpreter loses the carry of a rounded mantissa. So the numbers here need no rounding, but for one test.
"""

import pytest
import torch

pytest.importorskip("triton")


pytestmark = pytest.mark.xdist_group("triton")
GROUPS, ROWS, COLUMNS = 3, 70, 90  # more than one tile, none of them full
LARGEST = 448.0


def exact(*shape):
    """Return numbers of FP8, with the largest one in every row, times a power of two for each row."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(*shape, generator=generator) * 100).clamp(-400, 400).to(torch.float8_e4m3fn).float()
    x[..., 7] = LARGEST
    return x * 2.0 ** torch.randint(-8, 8, shape[:-1], generator=generator)[..., None]


def by_rows(x):
    from megatron_blackmamba.ops import fp8
    from megatron_blackmamba.ops.fp8 import triton as triton_fp8

    assert fp8.backends.choose(fp8.__name__, fp8.BACKENDS, "auto", x) is triton_fp8
    numbers, scale = fp8.by_rows(x)
    return numbers.float(), scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("adjacent", ["columns", "rows"])
@pytest.mark.parametrize("groups", [(), (GROUPS,)])
def test_numbers_and_scales_give_the_rows_back(interpreted, dtype, adjacent, groups):
    x = exact(*groups, ROWS, COLUMNS).to(dtype)
    given = x.mT.contiguous().mT if adjacent == "rows" else x
    numbers, scale = interpreted(by_rows, given)
    assert numbers.shape == x.shape and torch.equal(numbers * scale[..., None], x.float())
    assert torch.equal(scale * LARGEST, x.float().abs().amax(-1))


def test_parts_of_larger_tensor_are_read_in_place(interpreted):
    x = exact(ROWS, COLUMNS).bfloat16()
    wide = torch.full((ROWS, 2 * COLUMNS), 1e4, dtype=torch.bfloat16)
    wide[:, COLUMNS:] = x
    numbers, scale = interpreted(by_rows, wide[:, COLUMNS:])
    assert torch.equal(numbers * scale[:, None], x.float())


def test_most_random_numbers_round_as_in_pytorch(interpreted):
    from megatron_blackmamba.ops import fp8

    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    numbers, scale = interpreted(by_rows, x)
    wanted, wanted_scale = fp8.by_rows(x)
    assert torch.equal(scale, wanted_scale)
    assert (numbers == wanted.float()).float().mean() > 0.95


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_make_their_row_non_finite(interpreted, bad):
    x = exact(ROWS, COLUMNS)
    x[3, 5], x[4] = bad, 0.0
    numbers, scale = interpreted(by_rows, x)
    finite = (numbers * scale[:, None]).isfinite().all(dim=1)
    assert not finite[3] and finite.sum() == ROWS - 1 and not numbers[4].any()
