"""A cleaned document keeps the fields that it came with, through every stage and from every format."""

import base64
import json
from datetime import datetime
from decimal import Decimal

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq
import pytest

pytest.importorskip("datatrove", reason="datatrove is not installed: pip install megatron-blackmamba[dedup]")

from megatron_blackmamba.data_tools.other_fields import beside, line, without_text
from megatron_blackmamba.data_tools.rejects import InputError
from tests.data_tools.test_cleaning import clean, records_of

ITEM = "otter juggles seven lanterns beneath crimson arches"
OWN = {"id": "a-1", "url": "https://example.org/ä?q=1", "language": "en", "scores": {"toxicity": 1e-7}}


def kept(out):
    return [record for part in sorted(out.glob("part_*")) for record in records_of(part)]


def test_fields_survive_every_stage(tmp_path):
    texts = ["one quiet morning by the river", f"{'far away ' * 60}. {ITEM}. {'in other words ' * 60}", "a third text"]
    rows = [{**OWN, "text": text, "record": 7 + i, "cut": "gold"} for i, text in enumerate(texts)]
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    (tmp_path / "items.jsonl").write_text(json.dumps({"text": ITEM}) + "\n")
    clean("dedup", tmp_path / "raw.jsonl", tmp_path / "clean")
    clean("decontaminate", tmp_path / "clean", tmp_path / "final", "--against", tmp_path / "items.jsonl")
    for out in ("clean", "final"):
        found = sorted(kept(tmp_path / out), key=lambda record: record["record"])
        assert [record["text"] for record in found][::2] == texts[::2]
        for number, record in enumerate(found, 1):
            assert {key: record[key] for key in OWN} == OWN
            assert (record["file"], record["record"], record["input_record"]) == ("raw.jsonl", number, 6 + number)
    assert found[1]["cut"] != "gold" and found[1]["input_cut"] == found[0]["cut"] == "gold"
    assert {*OWN, "file", "record"} < {*pyarrow.json.read_json(tmp_path / "clean/part_00001.jsonl.zst").column_names}


@pytest.mark.parametrize("nested", [False, True])
def test_tables_keep_every_kind_of_column(tmp_path, nested):
    texts = ["one quiet morning", "an evening"]
    columns = {
        "body": [{"text": text, "lines": 3} for text in texts] if nested else texts,
        "time": pa.array([1, 2], pa.timestamp("ns")),
        "day": [datetime(2026, 1, 2)] * 2,
        "price": [Decimal("1.10")] * 2,
        "image": [b"\xff\xd8\x00", b"plain"],
        "score": [float("nan"), 0.5],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    counts = clean("dedup", tmp_path / "a.parquet", tmp_path / "out", "--field", "body.text" if nested else "body")
    assert counts["skipped"] == 0
    first, second = kept(tmp_path / "out")
    assert first["text"] == texts[0] and first.get("body") == ({"lines": 3} if nested else None)
    assert first["time"] == "1970-01-01 00:00:00.000000001" and first["day"] == "2026-01-02T00:00:00"
    assert first["price"] == "1.10" and first["score"] is None and second["score"] == 0.5
    assert base64.b64decode(first["image"]) == b"\xff\xd8\x00" and second["image"] == "plain"


@pytest.mark.parametrize("own", ['{"n": 1180591620717411303424}', '{"s": "\\ud800"}', '{"n": 9007199254740993}'])
def test_values_that_json_libraries_lose_are_kept(tmp_path, own):
    (tmp_path / "a.jsonl").write_text('{"text": "a quiet morning", ' + own[1:] + "\n")
    clean("dedup", tmp_path / "a.jsonl", tmp_path / "out")
    (record,) = kept(tmp_path / "out")
    assert {key: record[key] for key in json.loads(own)} == json.loads(own)


def test_text_is_taken_out_of_a_record():
    record = {"title": "t", "meta": {"text": "x", "url": "u"}, "body": [{"text": "y", "n": 1}], "id": 3}
    rest = without_text(("title?", "meta.text", "body[].text", "absent?"))(record)
    assert rest == {"meta": {"url": "u"}, "body": [{"n": 1}], "id": 3}
    assert beside({"text": "new"}, {"text": 1, "input_text": 2}) == {
        "text": "new",
        "input_text": 1,
        "input_input_text": 2,
    }
    assert json.loads(line({"a": {1: float("inf")}})) == {"a": {"1": None}}


def deep(levels, open="[", close="]"):
    return open * levels + "1" + close * levels


@pytest.mark.parametrize("verb", ["dedup", "filter"])
def test_records_nested_too_deeply_are_skipped(tmp_path, verb):
    lines = ['{"text": "a quiet morning", "m": %s}' % deep(levels) for levels in (240, 500)]  # noqa: UP031
    lines += ['{"text": "an evening", "m": %s, "n": NaN}' % deep(500, '{"a":', "}"), '{"text": "a night"}']  # noqa: UP031
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "recipe.yaml").write_text("- pii\n")
    paths = [tmp_path / "recipe.yaml"] * (verb == "filter") + [tmp_path / "a.jsonl", tmp_path / "out"]
    with pytest.raises(InputError, match=r"record 2: nested too deeply .*--max-bad"):
        clean(verb, *paths)
    counts = clean(verb, *paths[:-1], tmp_path / "second", "--max-bad", "2")
    assert (counts["kept"], counts["skipped"]) == (2, 2)
    assert kept(tmp_path / "second")[0]["m"] == json.loads(deep(240))


def test_values_beyond_pythons_range_are_skipped(tmp_path):
    days = pa.array([1, 4_000_000, 2], pa.int32()).cast(pa.date32())
    times = pa.array([1, 2, 9 * 10**18], pa.int64()).cast(pa.timestamp("us"))
    pq.write_table(pa.table({"text": ["one", "two", "three"], "day": days, "time": times}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"record 2: value out of range .*--max-bad"):
        clean("dedup", tmp_path / "a.parquet", tmp_path / "out")
    counts = clean("dedup", tmp_path / "a.parquet", tmp_path / "second", "--max-bad", "2")
    assert counts["skipped"] == 2 and [record["text"] for record in kept(tmp_path / "second")] == ["one"]


def test_nanoseconds_are_kept_wherever_they_are(tmp_path):
    times = pa.array([1_234_567], pa.int64())
    stamps = times.cast(pa.timestamp("ns"))
    columns = {
        "text": ["one"],
        "clock": times.cast(pa.time64("ns")),
        "list": pa.ListArray.from_arrays([0, 1], stamps),
        "struct": pa.StructArray.from_arrays([stamps, pa.array([3])], ["at", "n"]),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    clean("dedup", tmp_path / "a.parquet", tmp_path / "out")
    (record,) = kept(tmp_path / "out")
    assert record["clock"] == "00:00:00.001234567"
    assert record["list"] == ["1970-01-01 00:00:00.001234567"]
    assert record["struct"] == {"at": "1970-01-01 00:00:00.001234567", "n": 3}


def test_all_stages_of_dedup_skip_the_same_records(tmp_path):
    """A record that only the last stage could not read would shift the numbers of those behind it."""
    texts = ["one two three", "four five six", "seven eight nine", "four five six", "ten eleven twelve"]
    lines = [json.dumps({"text": text}) for text in texts]
    lines[0] = '{"text": "one two three", "m": %s}' % deep(400)  # noqa: UP031
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    clean("dedup", tmp_path / "a.jsonl", tmp_path / "out", "--max-bad", "1")
    assert sorted(record["text"] for record in kept(tmp_path / "out")) == sorted({*texts[1:]})
