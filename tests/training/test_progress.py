import json

from hypothesis import given
from hypothesis import strategies as st

from megatron_blackmamba.config import load
from megatron_blackmamba.training.step.progress import Progress


def test_skipped_samples_leave_the_learning_rate_unchanged():
    progress = Progress()
    progress.advance(16, 16)
    progress.passed_over.append((16, 31))
    progress.advance(48, 16)
    assert (progress.step, progress.next_sample, progress.consumed_samples) == (2, 48, 32)
    assert progress.between(16, 48) == [(32, 47)]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=5), st.integers(0, 60), st.integers(0, 60))
def test_read_samples_are_all_but_the_skipped(ranges, first, length):
    passed = [(start, start + more) for start, more in ranges]
    read = Progress(passed_over=passed).between(first, first + length)
    samples = [sample for a, b in read for sample in range(a, b + 1)]
    assert samples == [i for i in range(first, first + length) if not any(a <= i <= b for a, b in passed)]


def test_run_ends_with_its_last_batch():
    config = load("tiny", ["training.steps=3", "training.global_batch=4", "training.micro_batch=2"])
    assert Progress().end_of_data(config) == 12
    assert Progress(1, 8, 4, [(4, 7), (9, 10)]).end_of_data(config) == 18
    assert Progress(3, 20, 12).end_of_data(config) == 20


def test_last_batch_is_what_the_last_step_read():
    progress = Progress(0, 4)
    progress.advance(10, 4)
    assert progress.last_batch == (4, 10) and "last_batch" not in progress.state()


def test_progress_survives_json():
    progress = Progress(3, 64, 48, [(16, 31)])
    assert Progress.restored(json.loads(json.dumps(progress.state()))) == progress


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=5), st.integers(0, 40), st.integers(0, 40))
def test_the_end_counts_skipped_ranges_ahead(ranges, position, samples):
    skipped = [(first, first + more) for first, more in ranges]
    progress = Progress(next_sample=position, passed_over=skipped)
    left, at = samples, position
    while left:
        left -= not any(first <= at <= last for first, last in skipped)
        at += 1
    assert progress.end_after(samples) == at
