import os
import resource
from itertools import islice

import pytest
import torch

from megatron_blackmamba import batches, data, load_config
from megatron_blackmamba.data import BatchStream, DataError, open_files
from tests.data.corpus import data_config, write_mixture, write_shard

SAMPLES = 24


class Numbers:
    """Sample k is four times k."""

    def __getitem__(self, k):
        row = torch.full((4,), k)
        return {"dataset_id": k % 3, "tokens": row, "labels": row + 1, "loss_mask": torch.ones(4)}


def stream(**arguments):
    return BatchStream(Numbers(), **{"global_batch": SAMPLES, "micro_batch": 1, "workers": 0, **arguments})


def global_batches(count, dp_size, **arguments):
    """Micro-batches of all ranks, put together in order."""
    ranks = [stream(dp_rank=rank, dp_size=dp_size, **arguments) for rank in range(dp_size)]
    batches = []
    for _ in range(count):
        start, micro_batches = ranks[0].position, []
        while ranks[0].position == start:
            micro_batches.append([next(r) for r in ranks])
        batches.append([batch["sample_ids"].tolist() for row in micro_batches for batch in row])
    assert len({r.position for r in ranks}) == 1
    return batches, ranks[0].position


@pytest.mark.parametrize("dp_size", [2, 3, 4, 8])
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_every_rank_count_reads_the_same_micro_batches(dp_size, micro_batch):
    arguments = {"global_batch": 72, "micro_batch": micro_batch, "passed_over": [(30, 40)]}
    assert global_batches(3, dp_size, **arguments) == global_batches(3, 1, **arguments)


def test_batches_that_grow_continue_the_data():
    """A stream that is opened again in the middle of a ramp goes on with the batches of the one before."""

    def sizes(start):
        return lambda served: 4 if start + served < 10 else 12

    whole, _ = global_batches(5, 1, global_batch=sizes(0), passed_over=[(5, 6)])
    assert [sum(map(len, batch)) for batch in whole] == [4, 4, 4, 12, 12]
    assert global_batches(5, 2, global_batch=sizes(0), passed_over=[(5, 6)])[0] == whole
    rest, _ = global_batches(3, 1, global_batch=sizes(8), start_sample=10, passed_over=[(5, 6)])
    assert rest == whole[2:]


def test_batches_of_a_config_follow_its_ramp():
    ramp = "training.batch_ramp=[{batch: 2, until: 256}]"
    config = load_config("tiny", ["training.global_batch=4", "training.micro_batch=2", "data.sequence_length=64", ramp])
    samples = [batch["sample_ids"].tolist() for batch in islice(batches(config), 3)]
    assert samples == [[0, 1], [2, 3], [4, 5, 6, 7]]
    assert next(batches(config, start_sample=2))["sample_ids"].tolist() == [2, 3]


@pytest.mark.parametrize("before, after", [(8, 3), (1, 4), (4, 1)])
def test_resume_with_other_rank_count_continues_the_data(before, after):
    whole, _ = global_batches(5, 1)
    first, position = global_batches(2, before)
    rest, _ = global_batches(3, after, start_sample=position)
    assert first + rest == whole


def test_position_moves_after_the_whole_global_batch():
    batches = stream(start_sample=100, micro_batch=12, workers=2)
    with batches:
        next(batches)
        assert batches.position == 100
        next(batches)
        assert batches.position == 100 + SAMPLES


@pytest.mark.parametrize("workers", [1, 4])
def test_threads_change_nothing(workers):
    with stream(workers=workers) as ahead:
        for expected in (alone := stream()):
            batch = next(ahead)
            assert batch.keys() == expected.keys()
            assert all(torch.equal(batch[key], expected[key]) for key in batch)
            assert ahead.position == alone.position
            if alone.position == 4 * SAMPLES:
                break


def test_batch_carries_tokens_labels_and_sources():
    batch = next(stream(micro_batch=4, start_sample=7))
    assert batch["tokens"].shape == batch["labels"].shape == batch["loss_mask"].shape == (4, 4)
    assert batch["sample_ids"].tolist() == [7, 8, 9, 10]
    assert batch["source_ids"].tolist() == [1, 2, 0, 1]


def test_skipped_ranges_are_never_served():
    batches, position = global_batches(3, 2, passed_over=[(60, 70), (15, 30), (10, 20)])
    served = [sample for batch in batches for micro in batch for sample in micro]
    left = [k for k in range(200) if not 10 <= k <= 30 and not 60 <= k <= 70]
    assert served == left[: 3 * SAMPLES]
    assert position == served[-1] + 1


def test_parts_of_sequences_join_to_the_whole():
    class Counting:
        def __getitem__(self, k):
            row = 100 * k + torch.arange(8)
            return {"tokens": row, "labels": row + 1, "loss_mask": (torch.arange(8) != 4).float()}

    def first(**part):
        return next(BatchStream(Counting(), start_sample=3, global_batch=2, micro_batch=2, workers=0, **part))

    whole, parts = first(), [first(part=(number, 4)) for number in range(4)]
    for key in ("tokens", "labels", "loss_mask"):
        assert torch.equal(torch.cat([part[key] for part in parts], dim=1), whole[key])
    assert [part["before"].tolist() for part in parts] == [[-1, -1], [301, 401], [303, 403], [305, 405]]
    assert [part["after"].tolist() for part in parts] == [[303, 403], [-1, -1], [307, 407], [-1, -1]]


@pytest.mark.parametrize("dp_size", [1, 2])
def test_finite_set_is_read_once_and_padded(dp_size):
    ranks = [stream(dp_rank=r, dp_size=dp_size, stop_sample=31, micro_batch=4) for r in range(dp_size)]
    batches = [batch for rank in ranks for batch in rank]
    counted = [k for b in batches for k, m in zip(b["sample_ids"].tolist(), b["loss_mask"].sum(1), strict=True) if m]
    assert sorted(counted) == list(range(31))
    assert len(batches) == 12
    assert {k for b in batches for k in b["sample_ids"].tolist()} == {-1, *range(31)}
    assert sum(int(b["loss_mask"].sum()) for b in batches) == 31 * 4


def test_error_in_a_reading_thread_reaches_the_caller():
    class Broken(Numbers):
        def __getitem__(self, k):
            if k == 30:
                raise DataError("sample 30 is broken")
            return super().__getitem__(k)

    with (
        BatchStream(Broken(), global_batch=4, micro_batch=4, workers=2) as batches,
        pytest.raises(DataError, match="sample 30"),
    ):
        for batch in batches:
            assert batch["sample_ids"].max() < 30


def test_indivisible_batch_is_refused_with_a_remedy():
    with pytest.raises(DataError, match=r"24 samples.*micro-batches of 5 on 1.*training.global_batch"):
        stream(micro_batch=5)


# Mixtures of more shards than a process may have open files.


@pytest.fixture
def few_files():
    """This process may open forty more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_mixture_may_exceed_the_open_file_limit(tmp_path, few_files):
    for number in range(60):
        write_shard(tmp_path / f"a/{number}", 100 * number, 100)
    mixture = write_mixture(tmp_path, [{"name": "a", "shards": "a", "weight": 1}])
    plan = data.build(data_config(mixture), vocab_size=2**30, total_samples=10)
    assert len(plan.train[0]["tokens"]) == 16


def test_fixed_limit_names_who_can_raise_it(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    with pytest.raises(open_files.TooManyFiles, match="LimitNOFILE"):
        open_files.allow_open_files(5000)
