from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_blackmamba.data_tools import shuffle
from megatron_blackmamba.data_tools.shuffle import DocumentShuffler, document_order, order_keys

UINT16 = np.dtype("uint16")


def shuffled(folder, lengths, *, seed=0, shard=1, batch=1000, expected_bytes=0):
    """Documents whose tokens are their own number, through the shuffler, in batches."""
    lengths = np.asarray(lengths, np.int64)
    out, out_lengths = [], []
    with DocumentShuffler(folder, expected_bytes) as shuffler:
        for first in range(0, len(lengths), batch):
            part = lengths[first : first + batch]
            tokens = np.repeat(np.arange(first, first + len(part)), part).astype(UINT16)
            shuffler.add(tokens, part, order_keys(seed, shard, first, len(part)))
        for data, some in shuffler.drain(2):
            out.append(np.frombuffer(data, UINT16))
            out_lengths += some.tolist()
    assert list(folder.iterdir()) == []
    return np.concatenate(out), out_lengths


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=300), st.integers(1, 80), st.integers(0, 9))
def test_order_is_independent_of_batches_and_buckets(tmp_path_factory, lengths, batch, seed):
    folder = tmp_path_factory.mktemp("shuffle")
    tokens, out_lengths = shuffled(folder, lengths, seed=seed)
    order = document_order(seed, 1, len(lengths))
    assert tokens.tolist() == np.repeat(order, np.asarray(lengths)[order]).tolist()
    assert out_lengths == np.asarray(lengths)[order].tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "BUCKET_BYTES", 64)
        patch.setattr(shuffle, "_WRITE_BYTES", 50)
        patch.setattr(shuffle, "_GATHERED_AT_ONCE", 7)
        again, again_lengths = shuffled(folder, lengths, seed=seed, batch=batch, expected_bytes=2 * sum(lengths))
    assert again.tolist() == tokens.tolist() and again_lengths == out_lengths


@given(st.integers(0, 2**70), st.integers(1, 10**6), st.integers(0, 10**9), st.integers(1, 50))
def test_shuffle_key_depends_on_document_not_batch(seed, shard, first, count):
    keys = order_keys(seed, shard, first, count)
    assert keys[-1] == order_keys(seed, shard, first + count - 1, 1)[0]


def test_every_order_is_equally_likely():
    orders = Counter(tuple(document_order(seed, 1, 4)) for seed in range(24_000))
    assert len(orders) == 24
    chi_square = sum((seen - 1000) ** 2 / 1000 for seen in orders.values())
    assert chi_square < 50  # 23 degrees of freedom: beyond 49.7 once in a thousand


def test_seeds_and_shards_have_orders_of_their_own():
    orders = [tuple(document_order(seed, shard, 50)) for seed in range(3) for shard in range(1, 4)]
    assert len(set(orders)) == 9
