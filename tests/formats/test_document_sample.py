"""Samples of documents: the same documents in every shard, whatever else the shards hold."""

import numpy as np
import pytest

from megatron_blackmamba.formats.document_sample import (
    LARGEST,
    SIZE,
    DocumentSample,
    DocumentSampler,
    Sampled,
    TrainingSamples,
    document_hashes,
    document_keys,
)


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 50_000, length).astype(np.uint32) for length in rng.integers(1, 40, 12_000)]


def overlap(training, held_out, *most):
    return TrainingSamples(training).overlap(held_out, *most)


def sampled(documents, at_once=700):
    sampler = DocumentSampler()
    for first in range(0, len(documents), at_once):
        some = documents[first : first + at_once]
        sampler.add(np.concatenate(some), np.array([len(each) for each in some]))
    found = sampler.sample().decode()
    assert found is not None
    return found


def test_sample_is_the_smallest_hashes_of_all(documents):
    lengths, ids = np.array([len(each) for each in documents]), np.concatenate(documents)
    hashes = document_hashes(ids, lengths, document_keys(ids, lengths), np.arange(len(documents)))
    expected = np.unique(hashes)[:SIZE]
    for at_once in (1, 700, len(documents)):
        found = sampled(documents, at_once)
        assert np.array_equal(found.hashes, expected) and found.last == expected[-1]
        assert np.array_equal(hashes[found.numbers], expected)


def test_one_changed_token_changes_the_hash(documents):
    document = np.arange(1000, dtype=np.uint32)
    others = [document.copy() for _ in range(1000)]
    for place, other in enumerate(others):
        other[place] += 7
    assert len(sampled([document, *others]).hashes) == 1001


def test_small_samples_list_all_and_find_one(documents):
    a, b = sampled(documents[:50]), sampled(documents[40:60])
    assert a.last == LARGEST
    found = overlap([a], [b])
    assert (found.found, found.compared) == (10, 20)
    assert overlap([a], [sampled(documents[50:90])]) is None


def test_overlap_is_estimated_from_large_shards(documents):
    training = [sampled(documents[:6000]), sampled(documents[6000:])]
    found = overlap(training, [sampled(documents[5000:7000])])
    assert found.found == found.compared > 300
    fresh = [document + 1 for document in documents[:3000]]
    half = overlap(training, [sampled([*fresh, *documents[3000:6000]])])
    assert 0.4 < half.share < 0.6


def test_small_shard_does_not_hide_a_leak(documents):
    found = overlap([sampled(documents), sampled([documents[0] + 1])], [sampled(documents[:5000])])
    assert found.share == 1


def test_samples_of_newer_versions_are_not_compared():
    assert DocumentSample.model_validate({"version": 2, "hashes": "AAAA", "more": 1}).decode() is None


def test_texts_that_occur_everywhere_count_once(documents):
    everywhere = np.array([404, 404], np.uint32)
    training = [sampled([everywhere, *documents[i : i + 3000]]) for i in range(0, 9000, 3000)]
    held_out = [everywhere] * 500 + [document + 1 for document in documents[:40]]
    assert overlap(training, [sampled(held_out)]) is None  # one of 41, and known from samples only
    complete = overlap([sampled([everywhere, *documents[:30]])], [sampled(held_out)])
    assert (complete.found, complete.compared) == (1, 41)


def test_a_chance_excess_is_no_overlap(documents):
    """5 of 30 are shared, where 3 are allowed; the same share of 300 is no chance any more."""
    held_out = np.unique(sampled(documents).hashes)[:300]
    shared = np.flatnonzero(np.arange(300) % 6 == 0)
    for count, is_found in ((30, False), (300, True)):
        wanted = Sampled(held_out[:count], np.arange(count, dtype=np.uint32))
        large = Sampled(np.append(np.arange(SIZE, dtype=np.uint64), held_out[shared[shared < count]]), np.empty(0))
        assert (overlap([large], [wanted]) is not None) and (overlap([large], [wanted], 0.1) is not None) == is_found
    exact = Sampled(held_out[:5], np.arange(5, dtype=np.uint32))
    assert overlap([Sampled(held_out[:1], np.empty(0))], [exact], 0.1).share == 0.2  # both list all documents
