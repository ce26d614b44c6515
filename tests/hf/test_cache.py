"""Rows of the cache move with the rows of the batch, as beam search asks."""

import importlib.util

import pytest
import torch
from transformers import cache_utils

from megatron_blackmamba.hf import cache_blackmamba
from megatron_blackmamba.hf.cache_blackmamba import BlackMambaCache
from megatron_blackmamba.hf.configuration_blackmamba import BlackMambaConfig


@pytest.fixture
def without_layers(monkeypatch):
    """The module as imported beside a transformers before 5.21, which has no cache of such layers."""
    for name in [name for name in vars(cache_utils.Cache) if name.startswith(("get_conv", "get_recurrent", "update"))]:
        monkeypatch.delattr(cache_utils.Cache, name)
    spec = importlib.util.spec_from_file_location("megatron_blackmamba.hf.older", cache_blackmamba.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["installed", "older"])
def cache(request):
    """Three rows; every tensor holds the number of its row."""
    kind = BlackMambaCache
    if request.param == "older":
        kind = request.getfixturevalue("without_layers").BlackMambaCache
    cache = kind(BlackMambaConfig(num_layers=3, mamba_moe_layers=["attention", "4", "r"]))
    rows = torch.arange(3.0)
    cache.update_conv_state(rows[:, None, None].repeat(1, 4, 3), 2)
    cache.update_recurrent_state(rows[:, None, None].repeat(1, 4, 2), 2)
    cache.update(rows[:, None, None, None].repeat(1, 2, 7, 4), rows[:, None, None, None].repeat(1, 2, 7, 4), 0)
    cache.saw(rows[:, None].long().repeat(1, 7), rows.long())
    return cache


def numbers(cache):
    tensors = [cache.get_conv_state(2), cache.get_recurrent_state(2), cache.layers[0].keys, cache.layers[0].values]
    assert [tuple(tensor.shape[1:]) for tensor in tensors] == [(4, 3), (4, 2), (2, 7, 4), (2, 7, 4)]
    assert cache.documents_BS.shape[1:] == (7,)
    return [[int(row.flatten()[0]) for row in rows] for rows in (*tensors, cache.last_tokens, cache.documents_BS)]


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
    assert numbers(cache) == [rows] * 6


def test_reset_cache_has_seen_nothing(cache):
    cache.reset()
    assert (cache.get_seq_length(), cache.get_conv_state(2), cache.last_tokens) == (0, None, None)
    keys, _ = cache.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 0)
    assert keys.shape[2] == 1


def test_updates_return_what_attends(cache):
    window, state, token = torch.ones(3, 4, 3), torch.ones(3, 4, 2), torch.ones(3, 2, 1, 4)
    assert cache.update_conv_state(window, 2) is window is cache.get_conv_state(2)
    assert cache.update_recurrent_state(state, 2) is state is cache.get_recurrent_state(2)
    keys, values = cache.update(token, 2 * token, 0)
    assert keys.shape == values.shape == (3, 2, 8, 4)
    assert torch.equal(keys[:, :, 7:], token) and torch.equal(values[:, :, 7:], 2 * token)


@pytest.mark.parametrize("cache", ["installed"], indirect=True)
def test_cache_is_made_of_transformers_layers(cache):
    for layer, name in zip(cache.layers, ("DynamicLayer", "DummyLayer", "LinearAttentionLayer"), strict=True):
        assert name in [base.__name__ for base in type(layer).__mro__]
        if hasattr(cache_utils.Cache, "get_conv_state"):  # 5.21
            assert isinstance(layer, getattr(cache_utils, name))


def test_layers_are_counted_and_indexed(cache):
    assert len(cache) == 3
    assert [[tuple(tensor.shape) for tensor in cache[layer]] for layer in range(3)] == [
        [(3, 2, 7, 4), (3, 2, 7, 4)],
        [],
        [(3, 4, 3), (3, 4, 2)],
    ]
    assert cache[2][1] is cache.get_recurrent_state(2)


def test_cache_shows_how_much_it_has_seen(cache):
    assert repr(cache) == f"BlackMambaCache({cache.get_seq_length()} tokens seen, 3 layers)"


def test_states_cannot_be_cut_back(cache):
    with pytest.raises(NotImplementedError, match="cannot be cut back"):
        cache.crop(3)
