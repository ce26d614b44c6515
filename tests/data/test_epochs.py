import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_blackmamba.data.datasets import DataError, EpochDataset, HeldOutDataset
from megatron_blackmamba.data.stream import TokenStream
from megatron_blackmamba.data_tools.mixture import MixturePlan, SourcePlan
from megatron_blackmamba.formats.mixture import MixtureError
from megatron_blackmamba.formats.shards import Shard, ShardError
from megatron_blackmamba.formats.source_schedule import epochs_of, most_samples
from tests.data.corpus import write_shard

from megatron.core.datasets.indexed_dataset import IndexedDataset


def numbers(*lengths):
    """A stream of 0, 1, 2, … in parts of these lengths."""
    return TokenStream(np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1]))


def source(stream, sequence_length, seed=1, fingerprint="f", **more):
    return EpochDataset("numbers", stream, fingerprint, sequence_length, seed=seed, samples=0, **more)


parts = st.lists(st.integers(0, 60), min_size=1, max_size=6)


@settings(deadline=None, max_examples=150)
@given(parts, st.integers(1, 40), st.integers(0, 3), st.integers(0, 2**31))
def test_epoch_reads_every_token_once_except_the_tail(lengths, sequence_length, epoch, seed):
    tokens = sum(lengths)
    if tokens < sequence_length:
        with pytest.raises(DataError, match="less than one sample"):
            source(numbers(*lengths), sequence_length)
        return
    data = source(numbers(*lengths), sequence_length, seed)
    samples = [data[epoch * data.windows + i] for i in range(data.windows)]
    for part in ("tokens", "labels"):
        read = np.bincount(torch.cat([sample[part] for sample in samples]), minlength=tokens)
        assert read.max() == 1
        assert (read == 0).sum() == tokens % sequence_length < sequence_length


@settings(deadline=None, max_examples=50)
@given(parts.filter(lambda p: sum(p) > 20), st.integers(0, 10**6))
def test_sample_labels_are_the_next_tokens(lengths, index):
    sample = source(numbers(*lengths), 20)[index]
    assert torch.equal(sample["tokens"], (sample["tokens"][0] + torch.arange(20)) % sum(lengths))
    assert torch.equal(sample["labels"], (sample["tokens"] + 1) % sum(lengths))
    assert sample["loss_mask"].sum() == 20


def test_every_epoch_has_its_own_order_and_cuts():
    data = source(numbers(1003), 10)
    epochs = [[data.place(e * 100 + i) for i in range(100)] for e in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len({place % 10 for epoch in epochs for place in epoch}) > 3
    unread = [set(range(1003)) - {(p + i) % 1003 for p in epoch for i in range(10)} for epoch in epochs]
    assert unread[0] != unread[1]


def test_order_follows_from_seed_and_content_alone():
    one, same = source(numbers(5000), 10), source(numbers(2500, 2500), 10)
    assert [one.place(i) for i in range(1500)] == [same.place(i) for i in range(1500)]
    for other in (source(numbers(5000), 10, seed=2), source(numbers(5000), 10, fingerprint="g")):
        assert sum(one.place(i) == other.place(i) for i in range(500)) < 5


def test_max_epochs_limits_plans_not_rewound_runs():
    with pytest.raises(DataError, match=r"'numbers'.*151 samples, 1.5100 epochs of 1000 tokens.*max_epochs is 1.5"):
        EpochDataset("numbers", numbers(1000), "f", 10, seed=1, samples=151, max_epochs=1.5)
    data = EpochDataset("numbers", numbers(1000), "f", 10, seed=1, samples=150, max_epochs=1.5)
    assert len(data[160]) == len(data[149])  # after a spike, in place of samples that are passed over
    with pytest.raises(IndexError):
        data[-1]


@pytest.mark.parametrize(
    "tokens, length, most, samples", [(4000, 2048, 10, 19), (1000, 10, 2.3, 230), (90, 16, 0.5, 2)]
)
def test_plan_and_training_allow_the_same_epochs(tokens, length, most, samples):
    def planned(samples):
        epochs, allowed = epochs_of(samples, length, tokens), most_samples(most, length, tokens)
        line = SourcePlan("numbers", tokens, 1.0, 1.0, samples, epochs, most, allowed, 1, tokens)
        MixturePlan(samples * length, length, samples, float(tokens), [line], [], {}).check()

    def opened(samples):
        EpochDataset("numbers", numbers(tokens), "f", length, seed=1, samples=samples, max_epochs=most)

    planned(samples)
    opened(samples)
    with pytest.raises(MixtureError, match=f"max_epochs is {most}"):
        planned(samples + 1)
    with pytest.raises(DataError, match=f"max_epochs is {most}"):
        opened(samples + 1)


@settings(deadline=None, max_examples=50)
@given(parts.filter(lambda p: sum(p) > 1), st.integers(1, 40))
def test_validation_counts_every_label_once(lengths, sequence_length):
    data = HeldOutDataset("numbers", numbers(*lengths), "f", sequence_length)
    labels = torch.cat([data[i]["labels"][data[i]["loss_mask"] > 0] for i in range(len(data))])
    assert torch.equal(labels, torch.arange(1, sum(lengths)))
    with pytest.raises(IndexError):
        data[len(data)]


def test_stream_matches_megatron_core_document_by_document(tmp_path):
    prefixes = [write_shard(tmp_path / "one", 0, 300), write_shard(tmp_path / "two", 1000, 111, document=5)]
    documents = [IndexedDataset(str(prefix)) for prefix in prefixes]
    expected = np.concatenate([dataset[i] for dataset in documents for i in range(len(dataset))])
    stream = TokenStream.of_shards([Shard.open(prefix) for prefix in prefixes])
    assert np.array_equal(stream.read(0, len(stream)), expected)
    for shard, start in zip(stream.shards, (0, 300), strict=True):
        assert stream.start_of(shard) == start and stream.locate(start + 7) == (shard, 7)


def test_truncated_shard_is_refused_when_it_is_opened(tmp_path):
    prefix = write_shard(tmp_path / "one", 0, 300)
    with open(f"{prefix}.bin", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(ShardError, match=r"one\.bin: 1000 bytes, its manifest says 1200"):
        Shard.open(prefix)
