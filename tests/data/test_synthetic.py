import hashlib
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from megatron_blackmamba.data import DataError, build
from megatron_blackmamba.data.synthetic import FLOOR
from megatron_blackmamba.settings import DataConfig, SyntheticConfig


def plan(total_samples=3000, vocab_size=512, **more):
    config = DataConfig(kind="synthetic", sequence_length=128, synthetic=SyntheticConfig(sources=3, order=2), **more)
    return build(config, vocab_size=vocab_size, total_samples=total_samples)


def nats_per_token(samples, order, learned_from):
    """Loss of a table of counts, with a little of it left for what it never saw."""
    counts = defaultdict(Counter)
    for text in learned_from:
        for i in range(order, len(text)):
            counts[tuple(text[i - order : i])][text[i]] += 1
    losses = []
    for text in samples:
        for i in range(order, len(text)):
            seen = counts[tuple(text[i - order : i])]
            losses.append(-math.log((seen[text[i]] + 0.01) / (seen.total() + 5.12)))
    return np.mean(losses)


@pytest.mark.parametrize("source, order", [(0, 1), (1, 2)])
def test_sources_are_learnable_down_to_their_entropy(source, order):
    data = plan()
    text = [
        data.train.datasets[source][i]["tokens"].tolist() for i in range(267)
    ]  # 50 steps of 16 samples, a third each
    held_out = [data.validation[f"synthetic_{source}"][i]["tokens"].tolist() for i in range(20)]
    assert FLOOR - 0.05 < nats_per_token(held_out, order, text) < FLOOR + 0.15
    assert nats_per_token(held_out, order - 1, text) > FLOOR + 0.5


def test_sources_take_turns_and_speak_different_languages():
    data = plan(total_samples=9)
    assert [data.describe()["planned"]["sources"][name]["samples"] for name in data.source_names] == [3, 3, 3]
    letters = [{t for i in range(5) for t in dataset[i]["tokens"].tolist()} for dataset in data.train.datasets]
    assert letters[0] != letters[2]


def test_single_samples_are_reproducible_and_distinct():
    one, again, other = plan(), plan(), plan(seed=7)
    for k in (0, 12345, 10**9):
        assert torch.equal(one.train[k]["tokens"], again.train[k]["tokens"])
        assert not torch.equal(one.train[k]["tokens"], other.train[k]["tokens"])
        assert not torch.equal(one.train[k]["tokens"], one.train[k + 3]["tokens"])
    held_out, train = one.validation["synthetic_0"][0], one.train.datasets[0][0]
    assert not torch.equal(held_out["tokens"], train["tokens"])


def test_samples_are_those_of_earlier_versions():
    """Runs resume, and figures in the docs hold, only while a seed keeps its text."""
    data = plan()
    found = hashlib.sha256(b"".join(data.train[k]["tokens"].numpy().tobytes() for k in (0, 1, 2, 12345, 10**9)))
    assert found.hexdigest()[:16] == "b1aaf9895e8ab9c6"
    assert data.validation["synthetic_1"][3]["labels"].tolist()[:6] == [423, 11, 237, 354, 423, 473]


def test_tokens_stay_inside_a_small_vocabulary():
    data = plan(vocab_size=8)
    assert all(int(data.train[k]["tokens"].max()) < 8 for k in range(20))
    with pytest.raises(DataError, match="5 tokens, not 4"):
        plan(vocab_size=4)
