"""A resumed run reads the same data as without the stop, or is refused with the differences by source."""

import copy

import pytest

from megatron_blackmamba.data import DataError, refuse_changed_data
from megatron_blackmamba.data.changes import differences


def shard(name, sha, tokens=10):
    return {"path": name, "sha256": sha, "tokens": tokens}


RECORD = {
    "version": 1,
    "kind": "mixture",
    "seed": 7,
    "sequence_length": 16,
    "phases": [
        {"from_sample": 0, "shares": {"a": "1/2", "b": "1/2", "c": "0"}},
        {"from_sample": 100, "shares": {"a": "1", "b": "0", "c": "0"}},
    ],
    "sources": [
        {"name": "a", "fingerprint": "fa", "shards": [shard("a0", "0"), shard("a1", "1")]},
        {"name": "b", "fingerprint": "fb", "shards": [shard("b0", "2")]},
        {"name": "c", "fingerprint": "fc", "shards": [shard("c0", "3")]},
    ],
}


def changed(path, value):
    record = copy.deepcopy(RECORD)
    *way, last = path
    place = record
    for step in way:
        place = place[step]
    place[last] = value
    return record


def test_equal_data_has_no_differences():
    assert differences(RECORD, copy.deepcopy(RECORD), 1000) == []
    refuse_changed_data(RECORD, copy.deepcopy(RECORD), 1000)


@pytest.mark.parametrize(
    "key, value", [("version", 2), ("kind", "synthetic"), ("seed", 8), ("sequence_length", 32), ("seed", None)]
)
def test_changed_setting_is_named_with_both_values(key, value):
    assert differences(RECORD, changed([key], value), 1) == [f"{key}: {RECORD[key]} then, {value} now"]


def test_nothing_read_yet_means_nothing_changed():
    assert differences(RECORD, changed(["seed"], 8), 0) == []
    assert differences(RECORD, changed(["sources", 0, "fingerprint"], "other"), 0) == []


def test_changed_fingerprint_of_equal_shards_is_refused():
    record = changed(["sources", 1, "fingerprint"], "other")
    assert differences(RECORD, record, 1) == ["source 'b': fb then, other now"]
    with pytest.raises(DataError, match=r"in its first 1 samples:\n  source 'b'"):
        refuse_changed_data(RECORD, record, 1)


def test_source_that_was_not_read_may_change():
    assert differences(RECORD, changed(["sources", 2, "fingerprint"], "other"), 1000) == []


def test_missing_source_is_named():
    record = changed(["sources"], RECORD["sources"][1:])
    assert differences(RECORD, record, 1) == ["source 'a' is gone"]


def test_phases_count_from_their_first_sample():
    record = changed(["phases", 1, "shares", "c"], "1/3")
    assert differences(RECORD, record, 100) == []  # samples 0 to 99
    assert differences(RECORD, record, 101) == [
        "phase 1: from sample 100: a 1 then, from sample 100: a 1, c 0.3333 now",
    ]


def test_shares_equal_when_rounded_are_exact():
    record = changed(["phases", 0, "shares", "a"], "1000001/2000001")
    (line,) = differences(RECORD, record, 10)
    assert "a 1/2, b 1/2 then" in line and "a 1000001/2000001, b 1/2 now" in line


def test_changed_weights_are_answered_with_a_phase():
    with pytest.raises(DataError, match="Restore it; or change weights by a phase that starts at sample 10 or later"):
        refuse_changed_data(RECORD, changed(["phases", 0, "shares", "a"], "1/3"), 10)
    with pytest.raises(DataError, match="or add the new data as a source of weight 0 with a phase"):
        refuse_changed_data(RECORD, changed(["sources", 0, "fingerprint"], "other"), 10)


def test_phase_changed_in_the_past_is_named():
    shorter = changed(["phases"], RECORD["phases"][:1])
    assert differences(RECORD, shorter, 101) == ["phase 1: from sample 100: a 1 then, no such phase now"]
    assert differences(shorter, RECORD, 101) == ["phase 1: no such phase then, from sample 100: a 1 now"]


@pytest.mark.parametrize(
    "shards, lines",
    [
        ([shard("a0", "0"), shard("a1", "x", 11)], ["1 shards changed: a1 (11 tokens)"]),
        ([shard("a0", "0")], ["1 shards gone: a1 (10 tokens)"]),
        ([shard("a0", "0"), shard("a1", "1"), shard("a2", "4")], ["1 shards new: a2 (10 tokens)"]),
        (
            [shard("z", "0"), shard("a1", "x"), shard("a9", "y")],
            ["1 shards changed: a1 (10 tokens)", "1 shards new: a9 (10 tokens)"],
        ),
        (
            [shard(f"n{i}", f"n{i}") for i in range(4)],
            [
                "2 shards gone: a0 (10 tokens), a1 (10 tokens)",
                "4 shards new: n0 (10 tokens), n1 (10 tokens), n2 (10 tokens) and 1 more",
            ],
        ),
    ],
)
def test_shards_are_listed_as_changed_gone_or_new(shards, lines):
    record = changed(["sources", 0], {"name": "a", "fingerprint": "other", "shards": shards})
    assert differences(RECORD, record, 1) == [f"source 'a': {line}" for line in lines]
