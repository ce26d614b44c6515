"""Runs of several sequence lengths over one source, against counts of every token they read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_blackmamba.data.order import WindowOrder
from megatron_blackmamba.formats.reads import Read, SourceEpochs

KEY = "1 content"


def order(tokens, length, reads=()):
    return WindowOrder(SourceEpochs(tokens, length, reads), KEY)


def read(tokens, runs):
    """Return how often each token is read by runs of (length, samples), one after another."""
    counts, reads = np.zeros(tokens, int), []
    for length, samples in runs:
        numbered = order(tokens, length, tuple(reads))
        for sample in range(samples):
            counts[np.arange(numbered.place(sample), numbered.place(sample) + length) % tokens] += 1
        reads += [Read(sequence_length=length, samples=samples)] if samples else []
    return counts, tuple(reads)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_divisors_read_every_window_once_an_epoch(data):
    """Each run's length divides the one before, and the last ends the epoch, whatever the others left."""
    tokens, runs, reads = data.draw(st.integers(200, 3_000)), [], ()
    length = data.draw(st.integers(4, 48))
    for _ in range(data.draw(st.integers(1, 4))):
        left = SourceEpochs(tokens, length, reads).after(0)[0] if reads else tokens // length
        if left < 2:
            break
        runs.append((length, data.draw(st.integers(1, left - 1))))
        counts, reads = read(tokens, runs)
        assert counts.max() == 1, "a token is read twice before the epoch ends"
        length = data.draw(st.sampled_from([d for d in range(1, length + 1) if length % d == 0]))
    length = runs[-1][0]
    last = SourceEpochs(tokens, length, reads)
    counts, _ = read(tokens, [*runs, (length, last.left)])
    assert counts.max() == 1 and (counts == 0).sum() == tokens % runs[0][0]
    once = counts
    counts, _ = read(tokens, [*runs, (length, last.left + tokens // length)])
    assert (counts - once).max() == 1 and (counts == once).sum() == tokens % length


@pytest.mark.parametrize("runs", [[(64, 781), (256, 195)], [(64, 500), (256, 100), (1024, 20)], [(96, 700), (64, 400)]])
def test_what_is_read_again_is_known_before(runs):
    tokens, (length, samples) = 100_003, runs[-1]
    before, reads = read(tokens, runs[:-1])
    now, _ = read(tokens, runs)
    again = ((now > before) & (before > 0)).sum()
    assert SourceEpochs(tokens, length, reads).read_again(samples) == pytest.approx(again, rel=0.1)
    assert again > 1_000


def test_nothing_is_read_again_after_whole_epochs():
    tokens = 6_400
    assert SourceEpochs(tokens, 256, (Read(sequence_length=64, samples=200),)).read_again(25) == 0
    counts, _ = read(tokens, [(64, 200), (256, 25)])
    assert set(counts) == {3}


@pytest.mark.parametrize("runs", [[(24, 30), (8, 200)], [(24, 70), (12, 40), (4, 300)], [(24, 10), (36, 60)]])
def test_a_text_is_found_in_all_its_samples(runs):
    tokens, (length, samples) = 1_003, runs[-1]
    numbered = order(tokens, length, read(tokens, runs[:-1])[1])
    held = [(numbered.place(sample) + np.arange(length + 1)) % tokens for sample in range(samples)]
    for place, size in ((0, 5), (500, 37), (990, 40), (7, 200)):
        text = (place + np.arange(size)) % tokens
        found = sorted((p.sample, p.first_token, p.tokens) for p in numbered.parts(place, size, samples))
        for sample, window in enumerate(held):
            inside = [first for s, first, count in found if s == sample for first in range(first, first + count)]
            assert sorted(inside) == [i for i, token in enumerate(text) if token in window], sample


def test_max_epochs_counts_what_earlier_runs_read():
    epochs = SourceEpochs(10_000, 256, (Read(sequence_length=64, samples=100),))
    assert epochs.most_samples(1) == 14 and epochs.epochs(14) == pytest.approx(0.9984)
    assert epochs.most_samples(0.5) == 0
