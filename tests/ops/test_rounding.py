"""Stochastic rounding to bf16 keeps the mean, needs no state, and lets no NaN vanish."""

import torch

from megatron_blackmamba.ops import rounding


def state(count):
    g = torch.Generator().manual_seed(0)
    first, weight = torch.randn(count, generator=g), torch.randn(count, generator=g)
    return first.bfloat16(), (first**2).bfloat16(), weight


def test_rounding_keeps_the_mean_between_neighbours():
    first, second, weight = state(256)
    wide = weight * 1e-3
    below, steps = wide.view(torch.int32) & -0x10000, 2000
    neighbours = below.view(torch.float32), (below + 0x10000).view(torch.float32)
    total = torch.zeros(256, dtype=torch.float64)
    for step in range(steps):
        rounded = rounding.to_bf16(wide, rounding.random_bits(first, second, weight, rounding.seed_of(step))).float()
        assert ((rounded == neighbours[0]) | (rounded == neighbours[1])).all()
        total += rounded
    unit = (neighbours[1] - neighbours[0]).abs()
    error = ((total / steps - wide) / unit).abs()  # of a mean whose standard deviation is at most 0.5 / sqrt(steps)
    assert error.max() < 4.5 * 0.5 * steps**-0.5
    assert error.square().mean().sqrt() < 0.5 * steps**-0.5


def test_bits_are_uniform_and_independent():
    first, second, weight = state(2**16)
    draws = [rounding.random_bits(first, second, weight, rounding.seed_of(step)) for step in (1, 2)]
    lower, upper = (part.double() for part in (draws[0] & 0xFFFF, draws[0] >> 16 & 0xFFFF))
    later = (draws[1] & 0xFFFF).double()
    for part in (lower, upper, later):
        counts = torch.histc(part, 64, 0, 2**16)
        assert ((counts - 1024).square() / 1024).sum() < 120  # chi-squared of 63 degrees of freedom: once in 100,000
    for other in (upper, later):
        assert torch.corrcoef(torch.stack([lower, other]))[0, 1].abs() < 0.02


def test_what_bf16_holds_is_kept():
    held = torch.tensor([0.0, -0.0, 1.0, -3.5, float("inf"), float("-inf"), 2.0**-133])
    for bits in (0, 0xFFFF, -1):
        kept = rounding.to_bf16(held, torch.full((7,), bits, dtype=torch.int32))
        assert torch.equal(kept.float().view(torch.int32), held.view(torch.int32))


def test_nan_stays_nan():
    nan = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    assert rounding.to_bf16(nan, torch.full((3,), 0xFFFF, dtype=torch.int32)).isnan().all()
