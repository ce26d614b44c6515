"""Rows of the recurrent state move with the rows of the batch, as beam search asks."""

import pytest
import torch

from megatron_blackmamba.hf.modeling_blackmamba import BlackMambaCache


@pytest.fixture
def cache():
    """Three rows; every tensor holds the number of its row."""
    cache = BlackMambaCache()
    rows = torch.arange(3.0)
    cache.windows, cache.states = {0: rows[:, None].repeat(1, 2)}, {0: rows[:, None, None].repeat(1, 2, 4)}
    cache.last_tokens = rows.long()
    return cache


def numbers(cache):
    tensors = [cache.windows[0], cache.states[0], cache.last_tokens]
    assert cache.windows[0].shape[1:] == (2,) and cache.states[0].shape[1:] == (2, 4)
    return [[int(row.flatten()[0]) for row in tensor] for tensor in tensors]


@pytest.mark.parametrize(
    "change, rows",
    [
        (lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])), [2, 2, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ],
)
def test_cache_rows_follow_the_batch(cache, change, rows):
    change(cache)
    assert numbers(cache) == [rows] * 3


def test_reset_cache_has_seen_nothing(cache):
    cache.seen = 7
    cache.reset()
    assert (cache.get_seq_length(), cache.windows, cache.states, cache.last_tokens) == (0, {}, {}, None)
